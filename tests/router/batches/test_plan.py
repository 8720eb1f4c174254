"""Input files of batches, checked and ordered."""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.router.batches.plan import (
    LINES_FOR_EACH,
    MODELS_BYTES,
    MOST_ERRORS,
    MOST_MODELS,
    BadInputError,
    PlannedLine,
    lines_of,
    plan_of,
)

URL = "/v1/completions"


def line(name: str, prompt: str = "p", **other: Any) -> bytes:
    body = {"model": "m", "prompt": prompt}
    return orjson.dumps({"custom_id": name, "method": "POST", "url": URL, "body": body} | other)


def planned(text: bytes, most_lines: int = 100, most_line_bytes: int = 4096) -> list[PlannedLine]:
    plan, count, _ = plan_of(io.BytesIO(text), URL, most_lines=most_lines, most_line_bytes=most_line_bytes)
    found = lines_of(plan)
    assert len(found) == count
    return found


def codes(text: bytes, **limits: int) -> list[tuple[int | None, str]]:
    with pytest.raises(BadInputError) as refused:
        planned(text, **limits)
    return [(each.line, each.code) for each in refused.value.errors]


@given(
    names=st.lists(st.text(min_size=1, max_size=8), unique=True, min_size=1, max_size=20),
    gaps=st.lists(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"  \n \n\t", b"\n  "]), min_size=20, max_size=20),
    ends=st.booleans(),
)
def test_every_line_is_found_again_by_its_place(names: list[str], gaps: list[bytes], ends: bool) -> None:
    lines = [line(name) for name in names]
    text = b"".join(part for each in zip(lines, gaps, strict=False) for part in each)
    text = text if ends else text.rstrip()

    found = planned(text)

    assert [text[each.offset : each.offset + each.size_bytes] for each in found] == lines
    numbers = text.split(b"\n")
    assert [numbers[each.number - 1].strip() for each in found] == lines


def test_lines_whose_prompts_begin_alike_follow_each_other() -> None:
    documents = ["a" * 2000, "b" * 2000]
    text = b"\n".join(line(str(number), f"{documents[number % 2]} question {number}") for number in range(6))

    assert [each.number for each in planned(text)] == [1, 3, 5, 2, 4, 6]


def test_other_models_are_other_beginnings() -> None:
    lines = [line(str(n), body={"model": "one" if n % 2 else "two", "prompt": "same"}) for n in range(4)]
    assert [each.number for each in planned(b"\n".join(lines))] == [1, 3, 2, 4]


def test_all_errors_are_named_by_line_up_to_a_bound() -> None:
    assert codes(b"[]\n" + line("a") + b"\n{}\n" + line("a")) == [
        (1, "invalid_json_line"),
        (3, "missing_required_parameter"),
        (4, "duplicate_custom_id"),
    ]
    assert len(codes(b"x\n" * 1000)) == MOST_ERRORS


def test_files_without_a_line_or_with_too_many_or_too_long_ones_are_refused() -> None:
    assert codes(b"\n \n") == [(None, "empty_file")]
    assert codes(b"\n".join(map(line, "abc")), most_lines=2) == [(None, "too_many_tasks")]
    assert codes(line("a", "p" * 9000) + b"\n" + line("b")) == [(1, "line_too_long")]


def test_blank_lines_are_bounded_by_the_requests_that_a_file_may_have() -> None:
    assert len(planned(b"\n" * 396 + line("a"), most_lines=100)) == 1
    assert codes(b"\n" * (LINES_FOR_EACH * 100) + line("a"), most_lines=100) == [(None, "too_many_lines")]


@pytest.mark.parametrize("name", ["prompt", "tools"])
def test_what_is_nested_too_deeply_to_be_sent_is_an_error_of_its_line(name: str) -> None:
    nested: Any = []
    for _ in range(240):
        nested = [nested]
    text = line("a", body={name: nested})
    assert len(planned(text)) == 1
    text = text.replace(b"[]", b"[" * 20 + b"]" * 20)
    assert codes(text) == [(1, "invalid_json_line")]


def test_a_long_line_without_an_end_is_not_kept_whole() -> None:
    class Endless(io.RawIOBase):
        left = 50
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            self.left -= 1
            self.longest = max(self.longest, size)
            return b"x" * size if self.left > 0 else b""

    source = Endless()
    with pytest.raises(BadInputError):
        plan_of(source, URL, most_lines=10, most_line_bytes=1000)
    assert source.longest <= 1002


@pytest.mark.parametrize(
    ("other", "code"),
    [
        ({"custom_id": 7}, "missing_required_parameter"),
        ({"custom_id": "x" * 600}, "invalid_custom_id"),
        ({"method": "PUT"}, "invalid_method"),
        ({"url": "/v1/chat/completions"}, "url_mismatch"),
        ({"body": []}, "missing_required_parameter"),
        ({"body": {"stream": True}}, "invalid_body"),
    ],
)
def test_lines_that_cannot_be_run_are_errors(other: dict[str, Any], code: str) -> None:
    assert codes(line("a", **other)) == [(1, code)]


def test_the_models_of_lines_are_named_once() -> None:
    texts = [line(str(number), body={"model": model}) for number, model in enumerate("abab")]
    plan, _, models = plan_of(io.BytesIO(b"\n".join(texts)), URL, most_lines=10, most_line_bytes=1000)

    assert models == ("a", "b")
    assert sorted((each.number, each.model) for each in lines_of(plan)) == [(1, 0), (2, 1), (3, 0), (4, 1)]


def test_a_batch_names_no_more_models_than_its_record_holds() -> None:
    texts = [line(str(number), body={"model": f"m{number}"}) for number in range(MOST_MODELS + 1)]

    assert codes(b"\n".join(texts)) == [(MOST_MODELS + 1, "too_many_models")]
    long = [line(str(number), body={"model": "é" * (MODELS_BYTES // 4) + str(number)}) for number in range(2)]
    assert codes(b"\n".join(long), most_line_bytes=MODELS_BYTES) == [(2, "too_many_models")]
