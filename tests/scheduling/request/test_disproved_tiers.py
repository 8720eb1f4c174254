"""What the end of a request notes about a tier that had less than its placement expected."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.placing.placement import Observation
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.request.machine import Arrived, Ended, Failed, FirstToken, Granted, Post, Reserved, Sent
from dualmap.scheduling.request.outcome import Outcome, Usage
from dualmap.scheduling.state.tier_load import InTier, TierLoad
from tests.scheduling.request.lives import CLOSED, Life, course_of, member

LOADS = TierLoad(3, 0.3, 0.3, in_tiers=(InTier("host", 3, 1234),))


def noted(life: Life, usage: Usage | None, outcome: Outcome = Outcome.COMPLETED) -> Any:
    """The tier in the note of the last release."""
    life.on(FirstToken())
    life.on(Ended(outcome, usage))
    notes = [each.release.note for each in life.effects if isinstance(each, Post)]
    return json.loads(notes[-1] or "{}").get("disproved")


def loading(loads: TierLoad = LOADS, **spec: Any) -> Life:
    life = Life(**spec)
    life.on(Arrived())
    placed = life.placed(loads=loads)
    seen = Observation(1, 1, {}, 1234, {"a": loads.blocks})
    life.on(Reserved(course_of(replace(placed, reply=replace(placed.reply, seen=seen))), member("a")))
    life.on(Sent())
    return life


def test_the_end_of_a_request_notes_the_tier_that_lacked_what_was_loaded() -> None:
    assert noted(loading(), Usage(48, 0, 10)) == ["a", "host", 1234]


@pytest.mark.parametrize(
    ("usage", "outcome"),
    [
        (Usage(48, 48, 10), Outcome.COMPLETED),
        (Usage(48, None, 10), Outcome.COMPLETED),
        (None, Outcome.COMPLETED),
        (Usage(None, 0, 10), Outcome.COMPLETED),
        (Usage(10, 0, 10), Outcome.COMPLETED),
        (Usage(480, 0, 10), Outcome.COMPLETED),
        (Usage(48, 0, 10), Outcome.CLIENT_GONE),
    ],
)
def test_an_answer_that_shows_nothing_of_it_notes_no_tier(usage: Usage | None, outcome: Outcome) -> None:
    assert noted(loading(), usage, outcome) is None


def test_an_answer_of_another_try_notes_no_tier() -> None:
    life = loading()
    life.on(Failed(CLOSED))
    life.reserve("a")
    life.on(Sent())

    assert noted(life, Usage(48, 0, 10)) is None


def test_an_engine_that_truncates_the_prompt_or_had_stored_a_part_shows_nothing() -> None:
    assert noted(loading(shows_prompt=False), Usage(48, 0, 10)) is None


@pytest.mark.parametrize(("cached_tokens", "lacks"), [(264, False), (220, True)])
def test_what_was_found_is_compared_in_tokens_of_the_estimate(cached_tokens: int, *, lacks: bool) -> None:
    """A prompt that is cut by bytes has 330 tokens by its estimate, and 275 by its engine."""
    loads = TierLoad(20, 0.3, 0.3, in_tiers=(InTier("host", 20, 1234),))
    life = loading(loads, chain=Chain(tuple(range(1, 21)), 16, 330))

    assert (noted(life, Usage(275, cached_tokens, 10)) is not None) is lacks


def test_several_answers_show_nothing_as_all_but_the_first_find_what_that_computed() -> None:
    assert noted(loading(answers=2), Usage(48, 0, 10)) is None


@pytest.mark.parametrize(("instance_id", "lacks"), [("a", True), ("b", False)])
def test_a_request_that_was_moved_shows_nothing_of_either_instance(instance_id: str, *, lacks: bool) -> None:
    life = Life()
    life.on(Arrived())
    placed = life.placed(held=True, loads=LOADS)
    seen = Observation(1, 1, {}, 1234, {"a": 3, "b": 3})
    life.on(Reserved(course_of(replace(placed, reply=replace(placed.reply, seen=seen))), None))
    life.on(Granted(Grant("x", instance_id, "r", 1, 48), member(instance_id)))
    life.on(Sent())

    assert (noted(life, Usage(48, 0, 10)) is not None) is lacks
