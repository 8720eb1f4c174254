from __future__ import annotations

from dualmap.workers.kv_events.share import share_of

INSTANCES = [f"npu-{number}" for number in range(40)]
WORKERS = ["one", "two", "three"]


def test_every_instance_has_one_reader_and_every_worker_a_share() -> None:
    shares = [share_of(worker, INSTANCES, WORKERS) for worker in WORKERS]

    assert sorted(name for share in shares for name in share) == sorted(INSTANCES)
    assert all(share for share in shares)


def test_a_worker_that_goes_moves_its_share_alone() -> None:
    before = {worker: share_of(worker, INSTANCES, WORKERS) for worker in WORKERS}
    after = {worker: share_of(worker, INSTANCES, WORKERS[:2]) for worker in WORKERS[:2]}

    assert all(before[worker] <= after[worker] for worker in after)


def test_without_workers_there_is_no_share() -> None:
    assert share_of("one", INSTANCES, []) == frozenset()
