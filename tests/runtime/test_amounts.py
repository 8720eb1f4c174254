"""Counts as people write them."""

from __future__ import annotations

import pytest

from dualmap.runtime.amounts import whole_amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", 0),
        ("600", 600),
        ("50_000", 50_000),
        ("100k", 100_000),
        ("100K", 100_000),
        ("1.5M", 1_500_000),
        (" 2G ", 2 * 10**9),
    ],
)
def test_a_count_is_read_as_it_is_meant(text: str, amount: int) -> None:
    assert whole_amount(text) == amount


@pytest.mark.parametrize("text", ["", "k", "-5", "1.5", "0.0001k", "100m", "100 k", "1e3", "lots", "0x10"])
def test_what_is_no_whole_count_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="such as 600, 100k or 2M"):
        whole_amount(text)
