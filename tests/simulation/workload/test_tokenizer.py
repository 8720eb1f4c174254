"""Four bytes a token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dualmap.simulation.workload.tokenizer import block_hashes, count_tokens, decode, encode, render_chat

texts = st.text(max_size=200).map(str.encode)


@given(texts)
def test_tokens_are_counted_and_turn_back_into_their_text(text: bytes) -> None:
    ids = encode(text)
    assert len(ids) == count_tokens(text)
    assert decode(ids) == text


@given(texts, texts)
def test_a_longer_text_starts_with_the_hashes_of_its_beginning(text: bytes, more: bytes) -> None:
    short, long = block_hashes(text, 4), block_hashes(text + more, 4)
    assert len(short) == len(text) // 16
    assert long[: len(short)] == short


def test_hashes_cover_all_blocks_before_and_the_salt() -> None:
    one, other = block_hashes(b"a" * 16 + b"c" * 16, 4), block_hashes(b"b" * 16 + b"c" * 16, 4)
    assert not set(one) & set(other)
    assert not set(one) & set(block_hashes(b"a" * 16 + b"c" * 16, 4, "salt"))


def test_a_chat_s_rendering_extends_when_it_goes_on() -> None:
    turns = [{"role": "user", "content": "first"}]
    first = render_chat(turns).removesuffix(b"<|im_start|>assistant\n")
    longer = render_chat([*turns, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "second"}])
    assert longer.startswith(first)


def test_text_parts_read_as_the_text_they_hold_and_tools_come_first() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat([{"role": "user", "content": "hello"}])
    with_tools = render_chat([{"role": "user", "content": "hello"}], [{"type": "function"}])
    assert with_tools.startswith(b'<|im_start|>system\n[{"type":"function"}]')
