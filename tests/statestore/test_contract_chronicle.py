"""The store contract: the record of a pool's last minutes, on every backend."""

from __future__ import annotations

from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.chronicle import (
    KEPT_HAPPENINGS,
    KEPT_SAMPLES,
    ChronicleRecord,
    Happened,
    KnownProblem,
    MemberChange,
    PoolSample,
)

RECORD = ChronicleRecord(
    5000,
    "r",
    sampled_ms=5000,
    states={"a": "ready"},
    notes={"a": "slow"},
    replicas=("r",),
    leader="w",
    migrations={"drain": 2},
    hot={2**64 - 1: 3},
    counted={"r 1": {"late": 7}},
    grown={"late": 1},
    problems=(KnownProblem("default/late", "warning", "late", "why", "advice", 1, 2),),
)


async def test_a_pool_begins_without_a_record(pool: PoolStore) -> None:
    assert await pool.chronicle.last_step() is None
    assert await pool.chronicle.last_record() == ChronicleRecord()
    assert [*await pool.chronicle.samples(9), *await pool.chronicle.happened(9)] == []


async def test_of_two_steps_after_the_same_one_the_first_is_made(pool: PoolStore) -> None:
    sample, line = (
        PoolSample(5000, 5.0, counts={"late": 7}, held=1, overdue=2, running=3, ahead_s=4.5, ready=1, instances=1),
        Happened(5000, "trouble", "a: down"),
    )

    assert await pool.chronicle.record(RECORD, sample, [line], after=None)
    assert not await pool.chronicle.record(RECORD, sample, [line], after=None)
    assert await pool.chronicle.last_step() == b"5000"
    assert await pool.chronicle.last_record() == RECORD
    assert await pool.chronicle.samples(9) == [sample]
    assert await pool.chronicle.happened(9) == [line]
    assert await pool.chronicle.record(RECORD, None, [], after=b"5000")
    assert await pool.chronicle.samples(9) == [sample]


async def test_the_logs_keep_the_last_lines(pool: PoolStore) -> None:
    lines = [Happened(number, "state", str(number)) for number in range(KEPT_HAPPENINGS + 9)]
    after = None
    for number in range(KEPT_SAMPLES + 3):
        record = ChronicleRecord(at_ms=number)
        assert await pool.chronicle.record(record, PoolSample(number, 1.0), lines[number : number + 1], after=after)
        after = b"%d" % number
    await pool.chronicle.record(ChronicleRecord(at_ms=1), None, lines, after=after)

    assert len(await pool.chronicle.samples(10_000)) == KEPT_SAMPLES
    happened = await pool.chronicle.happened(10_000)
    assert [each.at_ms for each in happened] == [*range(KEPT_HAPPENINGS + 8, 8, -1)]


async def test_who_did_what_to_an_instance_is_in_its_log_and_in_what_happened(pool: PoolStore) -> None:
    await pool.chronicle.member_changed("alice", "drain", "a", "within 60 s")
    await pool.chronicle.member_changed("10.0.0.9", "remove", "a")

    now_ms = await pool.chronicle.now_ms()
    removed, drained = await pool.chronicle.member_changes(9)
    assert (removed.by, removed.action, removed.instance) == ("10.0.0.9", "remove", "a")
    assert drained == MemberChange(drained.at_ms, "alice", "drain", "a", "within 60 s")
    assert 0 < drained.at_ms <= removed.at_ms <= now_ms
    assert [each.text for each in await pool.chronicle.happened(9)] == [
        "10.0.0.9: remove a", "alice: drain a (within 60 s)",
    ]  # fmt: skip
    assert {each.kind for each in await pool.chronicle.happened(9)} == {"operator"}
