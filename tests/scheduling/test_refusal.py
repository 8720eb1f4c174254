"""Who is turned away at once."""

from __future__ import annotations

import pytest

from scheduling.refusal import refuses


@pytest.mark.parametrize(
    ("expected_s", "prior_s", "idle", "refused"),
    [
        (5.3, 2.2, False, True),
        (5.3, 2.2, True, False),  # the estimate may be spoilt, and nobody would put it right
        (5.3, 5.1, True, True),
        (4.9, 9.0, True, False),
        (5.0, 5.0, False, False),
    ],
)
def test_an_idle_instance_never_refuses_what_its_prior_would_serve_in_time(
    expected_s: float, prior_s: float, idle: bool, refused: bool
) -> None:
    assert refuses(expected_s, prior_s, 5.0, idle=idle) is refused
