"""The usage of a long answer beside that of the whole object, however it is cut."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.router.answers.fields import usage_of_answer
from dualmap.router.answers.usage_scan import UsageScan
from dualmap.scheduling.request.outcome import Usage

USAGE = {"prompt_tokens": 9000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 64}}
FALSE = {"usage": {"prompt_tokens": 1, "completion_tokens": 1}}
texts = st.text(max_size=90) | st.sampled_from(
    ["usage", '"usage":{"prompt_tokens":1}', "\\", '\\"usage"', '"usage', "}]{[", "\\\\", "x" * 100 + '"usage":{', "é"]
)
keys = st.sampled_from(["usage", "choices", "user", 'a"usage"', "\\"]) | st.text(max_size=5)
values = st.recursive(
    texts | st.integers(-(2**53), 2**53) | st.none() | st.just(FALSE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
others = st.dictionaries(keys.filter(lambda key: key != "usage"), values, max_size=5)


def scanned(body: bytes, cuts: list[int]) -> Usage | None:
    scan, at = UsageScan(), 0
    for cut in sorted(cuts):
        scan.feed(body[at:cut])
        at = max(at, cut)
    scan.feed(body[at:])
    return scan.usage


@given(others, others, st.booleans(), st.booleans(), st.lists(st.integers(0, 2000), max_size=12))
def test_it_is_that_of_the_whole_object(
    before: dict[str, Any], behind: dict[str, Any], has_usage: bool, indented: bool, cuts: list[int]
) -> None:
    whole = {**before, **({"usage": USAGE} if has_usage else {}), **{f"z{key}": each for key, each in behind.items()}}
    body = orjson.dumps(whole, option=orjson.OPT_INDENT_2 if indented else 0)

    assert scanned(body, [cut % (len(body) + 1) for cut in cuts]) == usage_of_answer({"usage": whole.get("usage")})


def test_it_is_found_wherever_the_answer_is_cut() -> None:
    body = orjson.dumps(
        {"choices": [FALSE, '\\"usage\\":{'], "user": "usage", "a": "\\" * 70, "usage": USAGE, "b": FALSE}
    )
    for cut in range(len(body)):
        assert scanned(body, [cut]) == Usage(9000, 64, 50)
    assert scanned(body, [*range(len(body))]) == Usage(9000, 64, 50)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"usage":null}', b'{"usage":3,"a":{"usage":{}}}', b'\x89PNG"{{', b'{"usage":{"pro']
)
def test_where_there_is_none_there_is_none(body: bytes) -> None:
    assert scanned(body, []) is None and scanned(body, [1, 2, 9]) is None
