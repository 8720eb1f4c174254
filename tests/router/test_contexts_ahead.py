"""What the requests ahead of one leave of its prefix."""

from __future__ import annotations

import pytest

from router.contexts_ahead import ContextsAhead, shared_blocks
from scheduling.chain import Chain
from scheduling.engine_blocks import engine_chain

BLOCK_TOKENS = 4
SYSTEM = range(100, 108)
CAPACITY = 100 + BLOCK_TOKENS  # the engine keeps one block to itself


def chain(own_tokens: int, first: int) -> Chain:
    """Two blocks that all prompts share, and tokens of its own."""
    return engine_chain([*SYSTEM, *range(first, first + own_tokens)], BLOCK_TOKENS)


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


def test_a_request_that_is_sent_again_counts_once() -> None:
    ahead = ContextsAhead()
    for _ in range(3):
        ahead.sent("a", "first", chain(20, 1000), output_tokens=24)

    assert ahead.left("a", chain(60, 2000), 60, CAPACITY) == 60


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
