"""Long bodies found out in steps: the same values as the parser's, counted and bounded before they are built."""

from __future__ import annotations

import json
import re
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.router.http import long_json
from dualmap.router.http.admission import json_object
from dualmap.router.http.long_json import LONG_STRING_BYTES, LongJson, scan_json

texts = st.text(max_size=30) | st.sampled_from(
    ["\\", '"', '\\"', "a\\" * 9, "😀" * 9, "\ud83d" * 9, "a\ude00" * 9, "😀\ud83d" * 5]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts | st.just("model"), inner, max_size=4),
    max_leaves=12,
)
SURROGATE = re.compile("[\ud800-\udfff]")
objects = st.dictionaries(texts | st.just("model"), values | texts, max_size=6)


def scan(body: bytes, *, max_values: int = 10_000, max_short_bytes: int = 1 << 20) -> tuple[LongJson, int]:
    """The fields that are found, and the number of steps."""
    work, steps = scan_json(body, max_values=max_values, max_short_bytes=max_short_bytes), 1
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, steps
        steps += 1


def whole(value: Any, long_texts: dict[str, bytes]) -> Any:
    """With the long strings in place of their names."""
    if isinstance(value, str):
        return long_texts[value].decode("utf-8", "surrogatepass") if value in long_texts else value
    if isinstance(value, list):
        return [whole(item, long_texts) for item in value]
    if isinstance(value, dict):
        return {whole(key, long_texts): whole(item, long_texts) for key, item in value.items()}
    return value


def count(value: Any) -> int:
    """Objects, arrays, strings and keys."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else int(isinstance(value, str))


@pytest.fixture(scope="module", autouse=True, params=[13, 31, 1000])
def step_bytes(request: pytest.FixtureRequest) -> Any:
    """Small steps and strings, so that everything is cut everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_json, "_STEP_BYTES", request.param)
        patch.setattr(long_json, "_STEP_STRINGS", 2)
        patch.setattr(long_json, "LONG_STRING_BYTES", 12)
        yield request.param


@given(objects, st.booleans(), st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))
def test_nothing_is_lost_whatever_is_cut_out(value: Any, ascii_only: bool, separators: tuple[str, str]) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    if not ascii_only:  # a lone surrogate can only be escaped
        text = SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    value, body = json.loads(text), text.encode()  # two that came to stand side by side are one character
    found, _ = scan(body)
    assert whole(json_object(found.short), found.long_texts) == value
    assert found.values == count(value) and found.numbers <= body.count(b",")
    model = value.get("model")
    if isinstance(model, str):
        assert found.model_span is not None
        assert read_json(body[slice(*found.model_span)]) == model


@given(st.binary(max_size=40) | st.text('[]{}",:\\u0dDmodel1 \n', max_size=40).map(str.encode))
def test_what_is_no_json_is_none_for_the_parser_either_or_left_to_it(body: bytes) -> None:
    try:
        found, _ = scan(body)
    except UnreadableJsonError:
        with pytest.raises(UnreadableJsonError):
            read_json(body)
        return
    if not found.long_texts:
        assert found.short == body


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"a":{"model":"inner"},"model":"own","b":[{"model":"inner"}]}', b'"own"'),
        (b'{"model":"first","model":"last"}', b'"last"'),
        (b'{"mod\\u0065l" : "own"}', b'"own"'),
        (b'{"\\u006d\\u006f\\u0064\\u0065\\u006c":"own"}', b'"own"'),
        (b'{"a":"model","own":"b"}', None),
        (b'{"model":7,"a":"b"}', None),
        (b'{"model":["a"]}', None),
    ],
)
def test_the_objects_own_model_is_found(body: bytes, model: bytes | None) -> None:
    span = scan(body)[0].model_span
    assert (body[slice(*span)] if span else None) == model


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'{"":1}', b"[[]]", b'"a"', b"1,1,1,1,1,1,1,1,1,1"])
def test_a_body_of_too_many_values_is_not_read_any_further(item: bytes) -> None:
    few, many = (b'{"a":[' + b",".join([item] * times) + b"]}" for times in (40, 100_000))
    assert scan(few, max_values=100)[0].values <= 100
    found, steps = scan(many, max_values=100)
    assert "over 100 objects" in found.excess and not found.short
    assert steps < 2000


def test_the_model_of_a_body_that_is_not_read_to_its_end_is_known_if_it_came_before() -> None:
    for body, model in ((b'{"model":"m","a":[', b'"m"'), (b'{"a":[{"model":"inner"},', None)):
        span = scan(body + b"[]," * 5000 + b'[]],"model":"late"}', max_values=100)[0].model_span
        assert (body[slice(*span)] if span else None) == model


@pytest.mark.parametrize("filling", [b" ", b"1", b'"a",'])
def test_what_is_left_without_long_strings_is_bounded(filling: bytes) -> None:
    body = b'{"a":[' + filling * 5000
    assert "over 1000 bytes" in scan(body, max_short_bytes=1000)[0].excess
    assert len(scan(b'{"a":"' + b"x" * 5000 + b'"}', max_short_bytes=1000)[0].short) < 100


@pytest.mark.parametrize("text", ["x" * 5000, "\n" * 2500, '"' * 2500, "é" * 2500, "😀" * 1250, "\\" * 2500])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_long_string_is_read_in_steps_and_its_name_follows_from_its_text(
    step_bytes: int, text: str, ascii_only: bool
) -> None:
    body = json.dumps({"a": text}, ensure_ascii=ascii_only).encode()
    found, steps = scan(body)
    assert steps > 2500 // max(step_bytes, 12)
    assert list(found.long_texts.values()) == [text.encode()]
    assert found.long_texts.keys() == scan(json.dumps({"b": text}).encode())[0].long_texts.keys()


@pytest.mark.parametrize(
    "string", [b'"' + b"x" * 50, b'"' + b"\\n" * 50, b'"\\', b'"\\u12', b'"' + b"a" * 50 + b'\\ud8"']
)
def test_a_string_that_is_none_is_unreadable(string: bytes) -> None:
    with pytest.raises(UnreadableJsonError, match="not valid JSON"):
        json_object(scan(b'{"a":' + string)[0].short)


@pytest.mark.parametrize(
    "item",
    [b"{}", b"[]", b'{"role":"","content":"","a":1}', b'"a"', b'"\xf0\x9f\x98\x80aaaa"', b"[1]", b"1", b"1.5"],
)
def test_what_building_takes_is_no_more_than_what_is_counted_for_it(item: bytes) -> None:
    body = b'{"a":[' + b",".join([item] * 20_000) + b"]}"
    found, _ = scan(body, max_values=1_000_000)
    tracemalloc.start()
    try:
        built = json_object(found.short)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert built
    assert peak_bytes <= found.memory_bytes


def test_strings_that_are_cut_out_are_those_that_only_a_long_body_can_have() -> None:
    from dualmap.router.http.admission import LONG_BODY_BYTES

    assert LONG_STRING_BYTES >= LONG_BODY_BYTES
