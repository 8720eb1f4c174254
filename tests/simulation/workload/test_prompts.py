"""Prompts share what their trace requests share, and are exactly as long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.prompts import PromptWriter
from dualmap.simulation.workload.tokenizer import block_hashes, count_tokens, render_chat
from dualmap.simulation.workload.traces import TraceRequest

BLOCK_TOKENS = 32


@st.composite
def trace_requests(draw: st.DrawFn) -> TraceRequest:
    tokens = draw(st.integers(20, 400))
    blocks = -(-tokens // BLOCK_TOKENS)
    shared = draw(st.integers(0, blocks))
    own = draw(st.integers(1, 1000))
    return TraceRequest(0.0, tokens, 5, tuple(range(shared)) + tuple(own * 1000 + n for n in range(blocks - shared)))


def shared_blocks(one: TraceRequest, other: TraceRequest) -> int:
    """Leading block ids that both have, as far as both prompts fill them."""
    full = min(one.input_tokens, other.input_tokens) // BLOCK_TOKENS
    same = 0
    while same < full and one.hash_ids[same] == other.hash_ids[same]:
        same += 1
    return same


@given(trace_requests())
def test_every_form_of_a_prompt_has_exactly_the_tokens_of_the_trace(request_: TraceRequest) -> None:
    writer = PromptWriter(BLOCK_TOKENS)
    chat = render_chat([{"role": "user", "content": writer.message(request_)}]).data
    assert count_tokens(chat) == request_.input_tokens
    assert count_tokens(writer.text(request_).encode()) == request_.input_tokens
    assert len(writer.token_ids(request_)) == request_.input_tokens
    assert set(writer.token_ids(request_)) <= set(range(300, 556))


@given(trace_requests(), trace_requests())
def test_prompts_share_exactly_the_blocks_whose_ids_are_equal(one: TraceRequest, other: TraceRequest) -> None:
    writer = PromptWriter(BLOCK_TOKENS)
    hashes = [block_hashes(writer.text(request).encode(), BLOCK_TOKENS) for request in (one, other)]
    same = sum(a == b for a, b in zip(*hashes, strict=False))
    assert same == shared_blocks(one, other)


@given(trace_requests(), trace_requests())
def test_as_chats_they_share_as_much_but_for_the_form_around_them(one: TraceRequest, other: TraceRequest) -> None:
    writer = PromptWriter(BLOCK_TOKENS)
    chats = [render_chat([{"role": "user", "content": writer.message(request)}]).data for request in (one, other)]
    hashes = [block_hashes(chat, BLOCK_TOKENS) for chat in chats]
    same = sum(a == b for a, b in zip(*hashes, strict=False))
    # The form puts four tokens before the text and eight behind it: the last block may fall on either side.
    assert abs(same - shared_blocks(one, other)) <= 1


def test_another_salt_shares_nothing() -> None:
    request = TraceRequest(0.0, 320, 5, tuple(range(10)))
    one, other = (
        block_hashes(PromptWriter(BLOCK_TOKENS, salt).text(request).encode(), BLOCK_TOKENS) for salt in ("", "again")
    )
    assert not set(one) & set(other)


def test_ids_that_do_not_cover_the_prompt_are_an_error() -> None:
    with pytest.raises(TraceError, match="1 block ids do not cover 33 tokens"):
        PromptWriter(BLOCK_TOKENS).text(TraceRequest(0.0, 33, 1, (1,)))
