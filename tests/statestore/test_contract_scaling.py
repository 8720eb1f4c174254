"""Scaling: its record, its log, and the blocks that choose who leaves, on every store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.scaling.scale_record import DecisionStatus, ScaleEntry, ScaleRecord
from dualmap.statestore.errors import LeaseLostError
from dualmap.statestore.pool import PoolStore

RECORD = ScaleRecord(
    decision_id=3,
    at_ms=1000,
    by="worker-1",
    bounds="2:6",
    size=2,
    wanted=4,
    reason="crowd: work for 3.1 instances",
    status=DecisionStatus.OPEN,
    starting=("a", "b"),
    spares=("a", "b", "c"),
    asked=1,
)


async def test_a_pool_that_never_scaled_has_record_0_and_an_empty_log(pool: PoolStore) -> None:
    assert await pool.publications.scaling() == ScaleRecord()
    assert list(await pool.publications.scaling_log(10)) == []


async def test_the_leader_records_what_any_process_reads(pool: PoolStore) -> None:
    lease = await pool.leader_lease.acquire("worker-1", 5000)
    assert lease is not None
    entries = [ScaleEntry(1000, 3, "decided", "2 -> 4"), ScaleEntry(2000, 3, "done", "4 ready")]
    for entry in entries:
        await pool.publications.record_scaling(RECORD, entry, fence=lease.fence)
    assert await pool.publications.scaling() == RECORD
    assert list(await pool.publications.scaling_log(10)) == entries[::-1]
    assert list(await pool.publications.scaling_log(1)) == entries[1:]
    assert list(await pool.publications.scaling_log(0)) == []


async def test_decode_instances_have_a_record_of_their_own_and_the_log_is_one(pool: PoolStore) -> None:
    lease = await pool.leader_lease.acquire("worker-1", 5000)
    assert lease is not None
    of_decode = replace(RECORD, role="decode", decision_id=1)
    for record in (RECORD, of_decode):
        entry = ScaleEntry(1000, record.decision_id, "decided", record.role)
        await pool.publications.record_scaling(record, entry, fence=lease.fence)
    assert await pool.publications.scaling() == RECORD
    assert await pool.publications.scaling("decode") == of_decode
    assert [line.text for line in await pool.publications.scaling_log(10)] == ["decode", ""]


async def test_a_former_leader_records_nothing(pool: PoolStore) -> None:
    lease = await pool.leader_lease.acquire("worker-1", 5000)
    assert lease is not None
    with pytest.raises(LeaseLostError):
        await pool.publications.record_scaling(RECORD, ScaleEntry(1, 3, "decided", ""), fence=lease.fence - 1)
    assert await pool.publications.scaling() == ScaleRecord()
    assert list(await pool.publications.scaling_log(10)) == []
