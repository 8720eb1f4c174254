"""Requests ahead of one leave it a part of its prefix."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualmap.router.pool.contexts_ahead import ContextsAhead, shared_blocks
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain

BLOCK_TOKENS = 4
SYSTEM = range(100, 108)
CAPACITY = 100 + BLOCK_TOKENS  # the engine keeps one block to itself


def chain(own_tokens: int, first: int) -> Chain:
    """Two blocks that all prompts share, and tokens of its own."""
    return engine_chain([*SYSTEM, *range(first, first + own_tokens)], BLOCK_TOKENS)


@dataclass(frozen=True)
class Counted:
    """The requests that the store counts as running on an instance."""

    running_requests: int
    context_tokens: int


def test_what_fits_beside_the_requests_ahead_stays() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(20, 1000), output_tokens=24)  # 40 tokens, half of its answer included

    assert ahead.left("a", chain(60, 2000), 60, CAPACITY) == 60
    assert ahead.left("b", chain(60, 2000), 60, 8) == 60


@pytest.mark.parametrize(("more", "left"), [(0, 68), (20, 48), (36, 32), (60, 8), (600, 8)])
def test_requests_ahead_take_the_room_but_for_what_they_share(more: int, left: int) -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(20, 1000), output_tokens=24)
    ahead.sent("a", "second", chain(more, 3000), output_tokens=0)

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY) == left
    assert ahead.left("a", chain(80, 2000), 8, CAPACITY) == 8


def test_part_of_a_block_takes_a_block() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(20, 1000), output_tokens=2)

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY) == 76


def test_requests_that_are_over_take_none() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(200, 1000), output_tokens=1)
    ahead.over("a", "first")
    ahead.over("a", "first")
    ahead.over("b", "first")

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY) == 88
    assert len(ahead) == 0


def test_of_many_requests_ahead_the_last_ones_are_compared() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(80, 2000), output_tokens=0)
    assert ahead.left("a", chain(80, 2000), 88, 140) == 88  # all of its prompt
    for number in range(16):
        ahead.sent("a", f"request {number}", chain(20, 3000 + 100 * number), output_tokens=0)
    assert ahead.left("a", chain(80, 2000), 88, 140) == 8
    ahead.over("a", "request 7")

    assert ahead.left("a", chain(80, 2000), 88, 140) == 88


def test_requests_of_other_replicas_take_what_the_store_counts_of_them() -> None:
    ahead = ContextsAhead()

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(0, 0)) == 88
    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(1, 10)) == 88
    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 40)) == 56, "with half a block each that is empty"
    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 400)) == 0, "nothing is known to be shared"


def test_requests_of_other_replicas_are_like_those_of_this_one() -> None:
    ahead = ContextsAhead()
    for number in range(3):
        ahead.sent("b", "over", chain(20, 1000 * number), output_tokens=12)
    ahead.over("b", "over")

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 60)) == 64, "8 tokens shared, half of 12 not there"
    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 400)) == 8


def test_what_a_request_continues_tells_nothing_of_what_others_share() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "turn", chain(20, 1000), output_tokens=0)
    ahead.over("a", "turn")
    ahead.sent("a", "next", chain(40, 1000), output_tokens=0)
    ahead.over("a", "next")

    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 400)) == 0


def test_own_requests_are_not_counted_again() -> None:
    ahead = ContextsAhead()
    ahead.sent("a", "first", chain(20, 1000), output_tokens=24)

    assert ahead.left("a", chain(60, 2000), 60, CAPACITY, Counted(1, 52)) == 60
    assert ahead.left("a", chain(60, 2000), 60, CAPACITY, Counted(0, 0)) == 60, "the store knows of it later"
    assert ahead.left("a", chain(80, 2000), 88, CAPACITY, Counted(2, 92)) < ahead.left(
        "a", chain(80, 2000), 88, CAPACITY
    )


def test_what_the_store_counts_until_it_has_the_release_takes_nothing() -> None:
    releasing = {"over"}
    ahead = ContextsAhead(releasing.__contains__)
    ahead.sent("a", "over", chain(60, 1000), output_tokens=32)
    ahead.over("a", "over")

    assert ahead.left("a", chain(80, 2000), 60, CAPACITY, Counted(1, 100)) == 60
    assert ahead.left("a", chain(80, 2000), 60, CAPACITY, Counted(2, 170)) == 44, "one is another replica's"
    releasing.clear()
    assert ahead.left("a", chain(80, 2000), 60, CAPACITY, Counted(1, 100)) == 12, "it is another replica's"


def test_a_request_that_is_sent_again_counts_once() -> None:
    ahead = ContextsAhead()
    for _ in range(3):
        ahead.sent("a", "first", chain(20, 1000), output_tokens=24)

    assert ahead.left("a", chain(60, 2000), 60, CAPACITY) == 60


def turns_over(ahead: ContextsAhead, *firsts: int) -> None:
    """Prompts of 28 tokens that came, one after the other, and are over: contexts of 40 tokens."""
    for first in firsts:
        ahead.sent("a", f"turn of {first}", chain(20, first), output_tokens=12)
        ahead.over("a", f"turn of {first}")


def test_contexts_that_ended_after_the_prefix_was_used_are_evicted_after_it() -> None:
    ahead = ContextsAhead()
    turns_over(ahead, 1000, 2000, 3000)
    ahead.sent("a", "ahead", chain(20, 4000), output_tokens=0)  # 28 tokens, 8 of them shared as those of all are

    assert ahead.left("a", chain(60, 3000), 28, CAPACITY) == 28, "the last that was used"
    assert ahead.left("a", chain(60, 2000), 28, CAPACITY) == 28, "32 tokens are newer: all fits"
    assert ahead.left("a", chain(60, 1000), 28, CAPACITY) == 16
    assert ahead.left("a", chain(60, 9000), 28, CAPACITY) == 28, "used through another replica: when is not known"


def test_a_context_that_another_request_continues_counts_once() -> None:
    ahead = ContextsAhead()
    turns_over(ahead, 1000, 2000, 3000)
    ahead.sent("a", "next turn", chain(40, 2000), output_tokens=0)

    assert ahead.left("a", chain(60, 1000), 28, CAPACITY) == 28


def test_without_requests_ahead_nothing_is_evicted() -> None:
    ahead = ContextsAhead()
    turns_over(ahead, *range(1000, 9000, 1000))

    assert ahead.left("a", chain(60, 1000), 28, CAPACITY) == 28


def test_what_ended_is_remembered_within_bounds() -> None:
    ahead = ContextsAhead()
    turns_over(ahead, *range(1000, 41_000, 1000))
    ahead.sent("a", "ahead", chain(20, 50_000), output_tokens=0)

    assert ahead.left("a", chain(60, 1000), 28, CAPACITY) == 28, "too long ago"
    assert ahead.left("a", chain(60, 20_000), 28, CAPACITY) == 8

    for number in range(2000):
        ahead.sent(f"instance {number}", "r", chain(20, 1000), output_tokens=0)
        ahead.over(f"instance {number}", "r")

    assert ahead.left("a", chain(60, 20_000), 28, CAPACITY) == 8, "what runs there keeps it"


def test_chains_of_text_are_not_compared() -> None:
    ahead = ContextsAhead()
    text = Chain(tuple(chain(200, 1000).hashes), BLOCK_TOKENS, 208)
    ahead.sent("a", "text", text, output_tokens=1)
    assert len(ahead) == 0
    ahead.sent("a", "first", chain(200, 1000), output_tokens=1)

    assert ahead.left("a", text, 88, CAPACITY) == 88


def test_chains_share_what_is_before_the_first_difference() -> None:
    one, other = chain(80, 1000).hashes, chain(40, 1000).hashes

    assert shared_blocks(one, other) == len(other) == shared_blocks(other, one)
    assert shared_blocks(one, chain(80, 2000).hashes) == 2
    assert shared_blocks(one, engine_chain(range(80), BLOCK_TOKENS).hashes) == 0
