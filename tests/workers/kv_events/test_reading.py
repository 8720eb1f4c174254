from __future__ import annotations

import pytest

from dualmap.workers.kv_events.reading import BEGINNING, BatchOrder, Position


@pytest.mark.parametrize(
    ("sequence", "published_s", "step"),
    [
        (8, 11.0, BatchOrder.NEXT),
        (9, 11.0, BatchOrder.GAP),
        (7, 10.0, BatchOrder.OLD),
        (3, 9.0, BatchOrder.OLD),
        (3, 11.0, BatchOrder.RESTART),
        (0, 11.0, BatchOrder.RESTART),
        (7, 11.0, BatchOrder.RESTART),
    ],
)
def test_a_batch_is_told_by_its_number_and_its_time(sequence: int, published_s: float, step: BatchOrder) -> None:
    assert Position(7, 10.0).order_of(sequence, published_s) is step


def test_an_engine_begins_at_0() -> None:
    assert BEGINNING.order_of(0, 5.0) is BatchOrder.NEXT
    assert BEGINNING.order_of(1, 5.0) is BatchOrder.GAP
