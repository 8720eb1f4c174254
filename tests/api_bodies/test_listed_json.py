"""A JSON object that is read as a frame and stretches is the object that was sent."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualmap.api_bodies import listed_json
from dualmap.api_bodies.listed_json import (
    LONG_STRING_BYTES,
    JsonBound,
    UnlistedError,
    bound_of,
    frame_bytes,
    has_long_string,
    items_begin,
    next_item,
    read_frame,
    stretches,
)


def read(body: bytes, begin: int | None = None) -> tuple[dict[str, Any], JsonBound]:
    """The object, its list read from an item on."""
    start = items_begin(body, "messages")
    items, bound, end = [], JsonBound(), start
    for stretch in filter(None, stretches(body, start if begin is None else begin)):
        items += stretch.items
        bound, end = bound + stretch.bound, stretch.end
    frame = frame_bytes(body, start, end, "only")
    fields = read_frame(frame, "messages", "only")
    fields["messages"] = items
    return fields, bound + bound_of(frame)


TEXTS = st.text('ab"\\{}[],: \né—\U0001f600', max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
ITEMS = st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), min_size=1, max_size=12)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:")])


def counted(value: Any) -> int:
    """Objects, arrays and strings."""
    if isinstance(value, dict):
        return 1 + sum(1 + counted(each) for each in value.values())
    return 1 + sum(map(counted, value)) if isinstance(value, list) else int(isinstance(value, str))


@given(ITEMS, st.dictionaries(TEXTS, VALUES), st.dictionaries(TEXTS, VALUES), SEPARATORS, st.integers(1, 80))
@example([{"a": "},{"}, {"b": [{"c": 1}, {"d": 2}]}], {}, {"tools": [{"x": 1}, {"y": 2}]}, (",", ":"), 1)
@example([{"a": "},{"}], {}, {"tools": [{"x": 1}, {"y": 2}]}, (",", ":"), 10)
def test_an_object_is_what_its_parts_are(
    items: list[Any], before: dict[str, Any], behind: dict[str, Any], separators: tuple[str, str], step: int
) -> None:
    whole = {**before, "messages": items, **behind}
    body = json.dumps(whole, ensure_ascii=False, separators=separators).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed_json, "STRETCH_BYTES", step)
        found, bound = read(body)
        begins = items_begin(body, "messages")
        ends = [stretch.end for stretch in stretches(body, begins) if stretch is not None]
        later = [(at, read(body, at)[0]) for end in ends if (at := next_item(body, end)) is not None]
    assert (found, [*found]) == (orjson.loads(body), [*orjson.loads(body)])
    assert bound.values >= counted(whole)
    assert bound.commas >= body.count(b",")
    for at, rest in later:
        assert rest["messages"] == orjson.loads(b"[" + body[at : ends[-1]] + b"]")


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m"}',
        b'{"messages":[]}',
        b'{"messages":[{"a":1}',
        b'{"messages":[{"a":1}]',
        b'{"messages":[{"a":1},]}',
        b'{"messages":[{"a":1}]}}',
        b'{"messages":[{"a":NaN}]}',
        b'{"messages":[{"a":"\\ud800"}]}',
        b'{"messages":[{"a":"\xff"}]}',
        b'["messages":[{"a":1}]]',
        b'{"x":{"messages":[{"a":1}]}}',
        b'{"x":{"messages":[{"a":1}]},"messages":[{"b":1}]}',
        b'{"messages":[{"a":1}],"messages":[{"b":1}]}',
        b'{"messages":[{"a":1}],"m\\u0065ssages":[{"b":1}]}',
        b'{"a":"\\"messages":[{"b":1}]}',
        b'{"messages":[{"a":1}],"messages":["other"]}',
    ],
)
def test_what_is_no_object_with_one_such_list_does_not_come_apart(body: bytes) -> None:
    with pytest.raises(UnlistedError):
        read(body)


@pytest.mark.parametrize("piece", ["x", '"', "\\", "\u20ac"])
@pytest.mark.parametrize("before", ["", "short", 'with "quotes"'])
def test_a_string_of_64_kb_is_found(piece: str, before: str) -> None:
    def text(size: int) -> bytes:
        long = piece * (size // len(json.dumps(piece, ensure_ascii=False).encode()[1:-1]))
        return json.dumps({"a": before, "b": long, "c": "short"}, ensure_ascii=False).encode()

    assert has_long_string(text(LONG_STRING_BYTES + 2))
    if piece == "x":
        assert not has_long_string(text(LONG_STRING_BYTES - 2))
    assert not has_long_string(json.dumps(["x" * 1000] * 500).encode())


def test_an_object_is_nested_as_deeply_as_the_reader_of_json_allows_in_a_whole() -> None:
    for depth in range(1010, 1030):
        body = b'{"messages":[{"a":%b1%b}]}' % (b"[" * depth, b"]" * depth)
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError:
            with pytest.raises(UnlistedError):
                read(body)
        else:
            assert [*read(body)[0]] == ["messages"]


def test_brackets_in_strings_do_not_count_as_nesting() -> None:
    body = json.dumps({"messages": [{"a": "[{" * 5000}]}).encode()
    assert read(body)[0] == orjson.loads(body)


def test_few_wrong_places_are_tried() -> None:
    parts = [{"type": "text", "text": "x" * 10}] * 5000
    body = json.dumps({"messages": [{"content": parts}, {"content": "y"}]}, separators=(",", ":")).encode()
    found = [*stretches(body, items_begin(body, "messages"))]
    assert [stretch is None for stretch in found] == [True] * found.count(None) + [False]
    assert 1 < found.count(None) < 12


def test_an_item_that_is_too_long_to_be_read_at_once_is_not_read_here() -> None:
    parts = [{"type": "text", "text": "x" * 100}] * 6000
    body = json.dumps({"messages": [{"content": parts}, {"content": "y"}]}, separators=(",", ":")).encode()
    with pytest.raises(UnlistedError):
        read(body)


@pytest.mark.parametrize("name", [b'"messages"', b'"messages":', b'"messages":['])
def test_a_name_without_a_list_is_passed_over_a_few_times(name: bytes) -> None:
    wrong = json.dumps([name.decode()] * 2).encode()
    body = b'{"x":%b,"messages":[{"a":1}]}' % wrong
    assert read(body)[0] == orjson.loads(body)
    with pytest.raises(UnlistedError):
        read(b'{"x":%b,"messages":[{"a":1}]}' % json.dumps({"messages": 1, "y": [{"messages": 1}] * 5}).encode())
