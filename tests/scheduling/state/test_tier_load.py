"""The load of a request from tiers, and what its answer shows about them."""

from __future__ import annotations

import pytest

from dualmap.scheduling.state.tier_load import InTier, Source, TierLoad

HOST, DISK = InTier("host", 4, 1000), InTier("disk", 6, 500)
LOADED = TierLoad(10, 0.2, 0.2, in_tiers=(HOST, DISK))
"""Behind five blocks on the device, of 100 tokens each."""


@pytest.mark.parametrize(
    ("cached_tokens", "lacking"),
    [
        (1500, None),
        (1300, None),  # cut to the engine's own blocks
        (1290, DISK),
        (900, DISK),
        (690, HOST),
        (500, HOST),
        (490, None),  # a part of the device's hit is missing, so no tier was looked into
        (0, None),
    ],
)
def test_an_answer_disproves_the_first_tier_that_had_less_than_was_loaded(
    cached_tokens: int, lacking: InTier | None
) -> None:
    assert LOADED.disproved_by(cached_tokens, 5, 100) is lacking


def test_what_was_to_be_computed_disproves_nothing() -> None:
    from_host = LOADED._replace(blocks=4)

    assert from_host.disproved_by(900, 5, 100) is None
    assert from_host.disproved_by(600, 5, 100) is HOST
    assert TierLoad(0, 0.0, 0.0, 0, (HOST,)).disproved_by(500, 5, 100) is None


def test_a_pull_that_brought_less_disproves_no_tier() -> None:
    assert LOADED._replace(source=Source("b", "b", 5710, 400, 0.1)).disproved_by(500, 5, 100) is None
