"""The leader's rounds, driven by hand over queues of this file's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from dualmap.scheduling.queues.granting import CommitReply, Grant
from dualmap.scheduling.queues.leader_jobs import (
    READ_LIMIT,
    REBALANCE,
    HotnessKeeper,
    Moved,
    evacuate,
    instances_to_evacuate,
    instances_to_park,
    reason_to_leave,
    rebalance,
    scheduled_ready,
    sweep_queue,
)
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead, QueueOrder, QueuePlan
from dualmap.scheduling.queues.rebalance import HotQueue, MigrateStatus, Migration, Move
from dualmap.scheduling.state.hotness import Arrival, HotnessRule, HotnessTree, HotnessWindow
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.steps import drive_now

Load = Callable[..., InstanceLoad]
NOW_MS = 1_000_000
FIFO = QueueOrder(by_deadline=False, max_deferred_s=30.0)


@dataclass
class LedFleet:
    """Queues by instance, a log of arrivals, and what the rounds have done with them."""

    heads: dict[str, QueueHead] = field(default_factory=dict)
    queues: dict[str, HotQueue] = field(default_factory=dict)
    migrations: dict[str, Migration] = field(default_factory=dict)
    """What becomes of a request that is moved; of others: migrated."""
    log: list[Arrival] = field(default_factory=list)
    done: list[Any] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    published: list[tuple[HotnessTree, dict[int, int]]] = field(default_factory=list)

    async def queue_head(self, instance_id: str) -> QueueHead | None:
        return self.heads.get(instance_id)

    async def queue(self, instance_id: str) -> HotQueue | None:
        return self.queues.get(instance_id)

    async def commit(self, plan: QueuePlan) -> CommitReply:
        self.done.append((plan.instance_id, [step.request_id for step in plan.steps]))
        return CommitReply(tuple(Grant(step.request_id, plan.instance_id, "replica", 1, 10) for step in plan.steps))

    async def migrate(self, request: StoredRequest, target_id: str, *, reason: str) -> Migration:
        self.done.append((request.request_id, target_id, reason))
        return self.migrations.get(request.request_id, Migration(MigrateStatus.MIGRATED))

    async def arrivals(self, after: str, limit: int) -> list[Arrival]:
        self.reads.append(after)
        return [arrival for arrival in self.log if int(arrival.entry_id) > int(after)][:limit]

    async def publish_tree(self, tree: HotnessTree, counts: dict[int, int]) -> int:
        self.published.append((tree, counts))
        return len(self.published)


def held(name: str, tokens: int, *, other: str | None = "b") -> StoredRequest:
    return StoredRequest(
        name,
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=tokens,
        prompt_tokens=tokens,
        expected_output_tokens=256,
        slo_ms=5000,
        enqueued_ms=NOW_MS,
        alternative_id=other,
        alternative_uncached_tokens=tokens,
    )


def hot(load: Load, *requests: StoredRequest) -> HotQueue:
    pending = 9000 + sum(request.uncached_tokens for request in requests)
    return HotQueue(
        NOW_MS, load("a", dispatched_tokens=9000, pending_tokens=pending), requests, {"b": load("b"), "c": load("c")}
    )


def head(load: InstanceLoad, *names: str) -> QueueHead:
    return QueueHead(NOW_MS, load, tuple(QueueEntry(name, NOW_MS - 1000, 10) for name in names))


# sweeps --------------------------------------------------------------------------------------------------------
def test_a_sweep_grants_what_has_room_though_nothing_happened_there(load: Load) -> None:
    fleet = LedFleet({"a": head(load("a"), "r1", "r2")})

    assert drive_now(sweep_queue("a", FIFO), fleet) == 2
    assert fleet.done == [("a", ["r1", "r2"])]


def test_a_sweep_of_an_unknown_instance_or_of_an_empty_queue_does_nothing(load: Load) -> None:
    fleet = LedFleet({"empty": head(load("empty"))})

    assert [drive_now(sweep_queue(name, FIFO), fleet) for name in ("unknown", "empty")] == [0, 0]
    assert fleet.done == []


# moves ---------------------------------------------------------------------------------------------------------
def moved(round_of: Any, fleet: LedFleet) -> tuple[Moved, ...]:
    result: tuple[Moved, ...] = drive_now(round_of, fleet)
    return result


def rebalanced(fleet: LedFleet, *, max_moves: int = 100) -> tuple[Moved, ...]:
    return moved(rebalance("a", FIFO, decode_stall_s=3.0, max_moves=max_moves), fleet)


def test_a_rebalance_moves_those_who_gain_and_says_what_became_of_each(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load, held("r1", 1000), held("r2", 1000, other="c"))})
    fleet.migrations["r1"] = Migration(MigrateStatus.NOT_HELD)

    # then the last in line gains most
    assert rebalanced(fleet) == (
        Moved("a", REBALANCE, Move("r2", "c", 10.0), MigrateStatus.MIGRATED),
        Moved("a", REBALANCE, Move("r1", "b", 9.0), MigrateStatus.NOT_HELD),
    )
    assert fleet.done == [("r2", "c", REBALANCE), ("r1", "b", REBALANCE)]


def test_a_rebalance_makes_no_more_moves_than_it_may(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load, held("r1", 1000), held("r2", 1000, other="c"))})

    assert [each.move.request_id for each in rebalanced(fleet, max_moves=1)] == ["r2"]


def test_where_a_moved_request_finds_room_it_is_granted_before_the_next_move(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load, held("r1", 1000), held("r2", 1000, other="c"))})
    fleet.migrations["r2"] = Migration(MigrateStatus.MIGRATED, head(load("c"), "r2"))

    rebalanced(fleet)

    assert fleet.done == [("r2", "c", REBALANCE), ("c", ["r2"]), ("r1", "b", REBALANCE)]


def test_nothing_held_nothing_moved(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load)})

    for each in (fleet, LedFleet()):
        assert rebalanced(each) == ()
        assert moved(evacuate("a", FIFO, {}, {}, decode_stall_s=3.0), each) == ()
        assert each.done == []


def test_an_evacuation_moves_all_that_have_somewhere_to_go(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load, held("r1", 1000), held("r2", 1000, other=None))})
    loads = {"a": load("a", state=InstanceState.DOWN), "b": load("b", pending_tokens=10), "c": load("c")}
    instances = {name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY) for name in loads}

    done = moved(evacuate("a", FIFO, loads, instances, decode_stall_s=3.0), fleet)

    assert [(each.move.request_id, each.move.target_id, each.status) for each in done] == [
        ("r1", "b", "migrated"),
        ("r2", "c", "migrated"),
    ]
    assert fleet.done == [("r1", "b", "instance_down"), ("r2", "c", "instance_down")]


def test_an_instance_that_is_back_in_service_is_not_evacuated(load: Load) -> None:
    fleet = LedFleet(queues={"a": hot(load, held("r1", 1000))})
    loads = {"a": load("a"), "b": load("b")}

    assert moved(evacuate("a", FIFO, loads, ready("a", "b"), decode_stall_s=3.0), fleet) == ()


def test_instances_out_of_service_with_held_requests_are_evacuated_if_another_one_is_ready(load: Load) -> None:
    loads = {
        "down": load("down", state=InstanceState.DOWN, queued_requests=1),
        "drains": load("drains", state=InstanceState.DRAINING, queued_requests=1),
        "empty": load("empty", state=InstanceState.DOWN, running_requests=1),
        "serves": load("serves", queued_requests=1),
    }

    assert instances_to_evacuate(loads, ready("serves")) == ("down", "drains")
    assert instances_to_evacuate(loads, {}) == ()
    assert {reason_to_leave(loads[name].state) for name in ("down", "drains")} == {"instance_down", "drain"}


def test_draining_instances_are_parked_once_nothing_is_left_on_them(load: Load) -> None:
    drains = {"state": InstanceState.DRAINING}
    loads = {
        "empty": load("empty", **drains),
        "holds": load("holds", queued_requests=1, **drains),
        "runs": load("runs", running_requests=1, **drains),
        "serves": load("serves"),
    }

    assert instances_to_park(loads) == ("empty",)


# hotness -------------------------------------------------------------------------------------------------------
RULE = HotnessRule(min_requests=4, hot_share_factor=2.0, cold_share_factor=1.0)


def keeper(max_requests: int = 2 * READ_LIMIT) -> HotnessKeeper:
    return HotnessKeeper(HotnessWindow(10_000, max_requests, max_key_blocks=8), RULE)


def ready(*names: str) -> dict[str, InstanceSpec]:
    return {name: InstanceSpec(name, f"http://{name}", state=InstanceState.READY) for name in names}


def test_only_ready_instances_that_prefill_count_for_the_rule_of_hotness() -> None:
    instances = {
        "a": InstanceSpec("a", "http://a", state=InstanceState.READY),
        "b": InstanceSpec("b", "http://b", state=InstanceState.READY, role=Role.PREFILL),
        "c": InstanceSpec("c", "http://c", state=InstanceState.READY, role=Role.DECODE),
        "d": InstanceSpec("d", "http://d", state=InstanceState.DOWN),
    }

    assert scheduled_ready(instances) == 2


def log(count: int, *, first: int = 1, prefix: int = 7, at_ms: int = 0) -> list[Arrival]:
    return [Arrival(str(first + number), at_ms, (prefix, 1000 + first + number)) for number in range(count)]


def test_the_tree_grows_by_what_arrived_and_each_arrival_is_read_once() -> None:
    hotness, fleet = keeper(), LedFleet(log=log(4))

    tree, version = drive_now(hotness.tick(HotnessTree(), ready(*"abcd")), fleet)
    again, unchanged = drive_now(hotness.tick(tree, ready(*"abcd")), fleet)

    assert (tree.hot, version, again, unchanged) == ({7: 1}, 1, tree, None)
    assert fleet.published == [(tree, {7: 4})]
    assert fleet.reads == ["0", "4"]


def test_counts_of_an_unchanged_tree_are_published_if_they_changed() -> None:
    hotness, fleet = keeper(), LedFleet(log=log(4))
    tree, _ = drive_now(hotness.tick(HotnessTree(), ready(*"abcd")), fleet)

    assert drive_now(hotness.renew_counts(tree), fleet) is None
    fleet.log += log(1, first=5)
    drive_now(hotness.tick(tree, ready(*"abcd")), fleet)

    assert drive_now(hotness.renew_counts(tree), fleet) == 2
    assert fleet.published == [(tree, {7: 4}), (tree, {7: 5})]


def test_a_long_log_is_read_to_its_end_in_one_round() -> None:
    hotness, fleet = keeper(), LedFleet(log=log(READ_LIMIT + 1))

    drive_now(hotness.tick(HotnessTree(), ready(*map(str, range(1000)))), fleet)

    assert fleet.reads == ["0", str(READ_LIMIT)]
    assert fleet.published[0][1] == {7: READ_LIMIT + 1}


@pytest.mark.parametrize(("later_ms", "hot"), [(9_999, {7: 1}), (10_000, {})])
def test_arrivals_are_forgotten_by_the_time_of_later_ones(later_ms: int, hot: dict[int, int]) -> None:
    fleet = LedFleet(log=[*log(4), *(Arrival(str(number), later_ms, (100 + number,)) for number in range(5, 9))])

    # then the prefix is hot with half of the requests, and cold once its own are outside the window
    tree, _ = drive_now(keeper().tick(HotnessTree({7: 1}), ready(*"abcd")), fleet)

    assert tree.hot == hot
