"""The full-screen table of a fleet, by its store alone."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from cli.top import Shown, pool_table
from router.traffic import INFO_FIELD, TrafficCounts
from scheduling.instance import InstanceLoad, InstanceState
from statestore.base import PoolOverview
from statestore.leases import Lease, ReplicaInfo

READY = InstanceState.READY
LOADS = {
    "a": InstanceLoad("a", READY, pending_tokens=100, prefill_tokens_per_s=1000.0, queued_requests=7),
    "b": InstanceLoad("b", READY, pending_tokens=9000, prefill_tokens_per_s=1000.0, context_tokens=1_500_000),
    "c": InstanceLoad("c", InstanceState.DOWN, prefill_tokens_per_s=1000.0, running_requests=3),
}


def overview(traffic: TrafficCounts) -> PoolOverview:
    replica = ReplicaInfo("r", 60_000, 60_000, {INFO_FIELD: traffic.to_text()})
    return PoolOverview(1000, LOADS, (replica,), Lease("worker-1", 3, 9000), {"rebalance": 4})


def text(renderable: Any) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(renderable)
    file: Any = console.file
    return str(file.getvalue())


def names(shown: str) -> str:
    rows = (line.split() for line in shown.splitlines()[2:])
    return "".join(row[0] for row in rows if row and row[0] in LOADS)


@pytest.mark.parametrize(
    ("sort", "order"),
    [("name", "abc"), ("ahead", "bac"), ("held", "abc"), ("running", "cab"), ("kv", "bac"), ("state", "cab")],
)
def test_instances_come_in_the_order_that_is_asked_for(sort: str, order: str) -> None:
    shown = text(pool_table("default", overview(TrafficCounts()), Shown(), sort, 5.0, None))

    assert names(shown) == order


def test_traffic_is_what_was_counted_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, now_s = Shown(), 100.0
    monkeypatch.setattr("cli.top.time.monotonic", lambda: now_s)
    pool_table("default", overview(TrafficCounts(ended=1000, late=1000)), shown, "name", 5.0, None)
    now_s = 110.0
    later = TrafficCounts(ended=1020, refused=5, on_time=15, late=1000, prompt_tokens=100, hit_tokens=25)

    headline = text(pool_table("default", overview(later), shown, "name", 5.0, None)).splitlines()[0]

    assert "2.0 requests/s · on time 100.0% · hit rate 25.0% · refused 25.0%" in headline
    assert "2/3 ready · 1 replicas · worker-1 leads · 4 migrations" in headline


def test_what_does_not_fit_the_screen_is_counted() -> None:
    shown = text(pool_table("default", overview(TrafficCounts()), Shown(), "ahead", 5.0, 1))

    assert "9.00" in shown
    assert "… 2 more" in shown
