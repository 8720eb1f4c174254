"""Replicas report their state to each other beside their requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import orjson

from dualmap.router.telemetry.pressure import WINDOW_S
from dualmap.router.ui.status import RecentEvents, ReplicaStatus, status_of
from tests.router import tools


async def test_a_status_survives_the_stream_of_a_peer(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    pool = runtime.pools.pools["default"]
    pool.evidence.breakers.busy("a", 30.0, runtime.context.clock.monotonic_s())
    pool.metrics.count_fault("a", "closed")
    runtime.context.metrics.refused(429, "queue_full")

    status = status_of(runtime)
    sent = orjson.loads(orjson.dumps(status))

    assert status.avoided["default"]["a"].state == "busy"
    assert status.faults == {"default": {"a": {"closed": 1}}}
    assert status.refusals == {"queue_full": 1}
    assert msgspec.convert(sent, ReplicaStatus) == status
    assert msgspec.convert(sent | {"of_a_later_version": 1}, ReplicaStatus) == status


def test_lately_counts_what_grew_within_the_window_and_nothing_from_before() -> None:
    recent = RecentEvents()

    def read(now_s: float, **refused: int) -> Counter[tuple[str, ...]]:
        return recent.read({name: ReplicaStatus(refusals={"x": count}) for name, count in refused.items()}, now_s)

    assert read(0, one=1000) == {}
    assert read(1, one=1002, two=500) == {("refusal", "x"): 2}
    assert read(2, one=1002, two=503) == {("refusal", "x"): 5}
    assert read(3, one=1, two=503) == {("refusal", "x"): 5}, "a process that began again"
    assert read(1 + WINDOW_S, one=1, two=503) == {("refusal", "x"): 3}
    assert read(2 + WINDOW_S, one=1, two=503) == {}
