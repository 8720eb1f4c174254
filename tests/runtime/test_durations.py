"""Times with a unit."""

from __future__ import annotations

import pytest

from dualmap.runtime.durations import duration_s


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0", 0.0), ("90s", 90.0), ("1.5m", 90.0), ("2h", 7200.0)])
def test_a_time_is_seconds_or_has_its_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5d", "-5s", "5 m", "nan", "inf"])
def test_another_text_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="is no time such as"):
        duration_s(text)
