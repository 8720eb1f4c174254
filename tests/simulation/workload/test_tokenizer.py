"""Four bytes a token."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dualmap.simulation.workload.tokenizer import (
    ImageRun,
    PromptText,
    block_hashes,
    count_tokens,
    decode,
    encode,
    image_keys,
    render_chat,
)
from tests.support.images import png_url

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
    first = render_chat(turns).data.removesuffix(b"<|im_start|>assistant\n")
    longer = render_chat([*turns, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "second"}])
    assert longer.data.startswith(first)


def test_text_parts_read_as_the_text_they_hold_and_tools_come_first() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert render_chat([{"role": "user", "content": parts}]) == render_chat([{"role": "user", "content": "hello"}])
    with_tools = render_chat([{"role": "user", "content": "hello"}], [{"type": "function"}])
    assert with_tools.data.startswith(b'<|im_start|>system\n[{"type":"function"}]')


def shown(*images: str, text: str = "what is it?", **fields: Any) -> PromptText:
    parts = [{"type": "image_url", "image_url": {"url": each}, **fields} for each in images]
    return render_chat([{"role": "user", "content": [{"type": "text", "text": text}, *parts]}])


def test_an_image_is_a_run_of_equal_tokens_by_its_size_and_an_identifier_by_its_content() -> None:
    cat, dog, wide = (shown(png_url(*size)) for size in ((56, 28, 1), (56, 28, 2), (57, 28, 1)))
    (run,) = cat.images
    assert run.length == 2 and encode(cat.data)[run.offset] == encode(cat.data)[run.offset + 1]
    assert cat.data == dog.data and cat.images[0].identifier != dog.images[0].identifier
    assert wide.images[0].length == 3 and len(encode(wide.data)) == len(encode(cat.data)) + 1
    named = shown(png_url(56, 28, 1), uuid="mine")
    assert named.images == (ImageRun("mine", run.offset, 2),) and named.data == cat.data


def test_blocks_are_told_apart_by_the_images_in_them_and_by_their_places() -> None:
    cat, dog = (shown(png_url(280, 28, 3), png_url(28, 28, image)) for image in (1, 2))
    hashes = [block_hashes(each.data, 4, images=each.images) for each in (cat, dog)]
    differing = [place for place, (one, other) in enumerate(zip(*hashes, strict=True)) if one != other]
    assert differing == list(range(cat.images[1].offset // 4, len(hashes[0])))
    first, second = cat.images
    assert image_keys(cat.images, 4, first.offset // 4) == [(first.identifier, first.offset % 4)]
    assert image_keys(cat.images, 4, first.offset // 4 + 1) == [(first.identifier, first.offset % 4 - 4)]
    assert (second.identifier, second.offset % 4) in image_keys(cat.images, 4, second.offset // 4)
    assert image_keys(cat.images, 4, 0) == []
