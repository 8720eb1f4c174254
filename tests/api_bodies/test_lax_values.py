from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from dualmap.api_bodies.lax_values import lax_bool, lax_int

WRITTEN = st.one_of(
    st.from_regex(r"\A[ \t]?[+-]?[0-9_]{1,6}(\.[0-9]{0,3})?(e[0-9])?[ \n]?\Z"),
    st.sampled_from(["true", "TRUE", "t", "y", "Yes", "on", "OFF", "no", "n", "f", "False", "", " true", "nan", "2"]),
    st.text(max_size=6),
)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(-1e15, 1e15), st.floats(-9, 9).map(round).map(float), WRITTEN
)


def understood(kind: Any, value: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return None


@given(VALUES)
def test_values_are_understood_as_pydantic_understands_them(value: Any) -> None:
    for kind, read in ((int, lax_int), (bool, lax_bool)):
        assert read(value) == understood(kind, value), (kind, value)


@pytest.mark.parametrize(
    "written",
    ["0__50", "00_50", "0_0__5_0", "+0__50", "-0__50", "0__0", "0_", "_0", "0__", "0_.0", "5__0", "\u00a0 50\t",
     " " * 5000 + "50", "0" * 5000 + "50", "0_" * 5000 + "50", "50." + "0" * 5000, "9" * 4300],
    ids=lambda written: f"{written[:6]}-{len(written)}",
)  # fmt: skip
def test_a_number_is_read_out_of_any_text_that_pydantic_reads_one_out_of(written: str) -> None:
    assert lax_int(written) == understood(int, written)


@pytest.mark.parametrize("value", [None, [], {}, [1], {"a": 1}, float("nan"), float("inf"), 1e300])
def test_what_is_no_number_is_unknown(value: Any) -> None:
    assert lax_int(value) is None
    assert lax_bool(value) is None
