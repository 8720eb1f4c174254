"""The replica remembers answers that ended a moment ago."""

from __future__ import annotations

from typing import Any

from dualmap.router.pool.recent_answers import KEPT_S, MAX_KEPT, RecentAnswers
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.scheduling.request.outcome import Usage

BLOCK_TOKENS = 4


def chain(tokens: int, first: int = 0) -> Chain:
    return engine_chain(range(first, first + tokens), BLOCK_TOKENS)


def test_the_next_turn_is_expected_to_find_all_blocks_that_the_answer_filled(clock: Any) -> None:
    recent = RecentAnswers(clock)
    recent.ended("a", chain(10), Usage(output_tokens=9))  # 18 tokens computed: four full blocks

    assert recent.cached("a", chain(30), 30 - 8) == 16
    assert recent.cached("a", chain(30), 30 - 12) == 16
    assert recent.cached("a", chain(16), 16 - 8) == 12  # the last token is computed in any case
    assert recent.cached("a", chain(30), 30 - 20) == 20


def test_an_answer_whose_prompt_is_listed_no_more_is_gone_too(clock: Any) -> None:
    recent = RecentAnswers(clock)
    recent.ended("a", chain(10), Usage(output_tokens=9))

    assert recent.cached("a", chain(30), 30 - 4) == 4


def test_other_instances_and_other_prompts_are_left_as_they_are(clock: Any) -> None:
    recent = RecentAnswers(clock)
    recent.ended("a", chain(10), Usage(output_tokens=9))

    assert recent.cached("b", chain(30), 30 - 8) == 8
    assert recent.cached("a", chain(30, first=1), 30 - 8) == 8
    assert recent.cached("a", Chain(tuple(chain(30).hashes), BLOCK_TOKENS, 30), 30 - 8) == 8


def test_what_events_have_told_by_then_counts_after_a_moment(clock: Any) -> None:
    recent = RecentAnswers(clock)
    recent.ended("a", chain(10), Usage(output_tokens=9))

    clock.now_s += 2 * KEPT_S
    assert recent.cached("a", chain(30), 30 - 8) == 8
    assert len(recent) == 0


def test_answers_without_usage_are_not_kept_and_memory_is_bounded(clock: Any) -> None:
    recent = RecentAnswers(clock)
    recent.ended("a", chain(10), Usage(output_tokens=None))
    assert len(recent) == 0
    for number in range(MAX_KEPT + 10):
        recent.ended("a", chain(10, first=number), Usage(output_tokens=1))
    assert len(recent) == MAX_KEPT
