from __future__ import annotations

import pytest

from dualmap.workers.kv_events.reading import BEGINNING, Position, Step


@pytest.mark.parametrize(
    ("sequence", "published_s", "step"),
    [
        (8, 11.0, Step.NEXT),
        (9, 11.0, Step.GAP),
        (7, 10.0, Step.OLD),
        (3, 9.0, Step.OLD),
        (3, 11.0, Step.RESTART),
        (0, 11.0, Step.RESTART),
        (7, 11.0, Step.RESTART),
    ],
)
def test_a_batch_is_told_by_its_number_and_its_time(sequence: int, published_s: float, step: Step) -> None:
    assert Position(7, 10.0).step_to(sequence, published_s) is step


def test_an_engine_begins_at_0() -> None:
    assert BEGINNING.step_to(0, 5.0) is Step.NEXT
    assert BEGINNING.step_to(1, 5.0) is Step.GAP
