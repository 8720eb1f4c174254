"""The room that interactive work leaves to batches."""

from __future__ import annotations

import pytest

from dualmap.scheduling.batches.slack import SEQUENCES_PART, room_for_replica, room_of
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState

IDLE = InstanceLoad(
    "a", InstanceState.READY, 0, 8000.0, 100_000, max_running_requests=100, dispatch_window_tokens=4096
)  # fmt: skip


def load(**changes: object) -> InstanceLoad:
    named = {name: getattr(IDLE, name) for name in ("prefill_tokens_per_s", "kv_capacity_tokens")}
    fixed = {"instance_id": "a", "state": InstanceState.READY, "max_running_requests": 100}
    return InstanceLoad(**(fixed | named | changes))


def room(found: InstanceLoad, line_tokens: int = 100) -> int:
    return room_of(found, slo_s=5.0, line_tokens=line_tokens)


def test_an_idle_instance_takes_a_part_of_its_sequences() -> None:
    assert room(load()) == SEQUENCES_PART * 100


def test_memory_bounds_the_room_and_a_part_of_it_stays_free() -> None:
    assert room(load(), line_tokens=10_000) == 8
    assert room(load(context_tokens=60_000), line_tokens=10_000) == 2
    assert room(load(context_tokens=10_000, kv_used_tokens=75_000), line_tokens=10_000) == 0


def test_prefill_that_waits_leaves_no_room() -> None:
    assert room(load(pending_tokens=4000)) > 0
    assert room(load(pending_tokens=4001)) == 0


def test_running_and_held_requests_take_sequences() -> None:
    assert room(load(running_requests=4, queued_requests=3)) == 3
    assert room(load(running_requests=80)) == 0


@pytest.mark.parametrize("state", [state for state in InstanceState if state is not InstanceState.READY])
def test_instances_that_are_not_ready_take_nothing(state: InstanceState) -> None:
    assert room(load(state=state)) == 0


def test_replicas_share_the_room_of_all_instances() -> None:
    loads = [load(), load(), load(state=InstanceState.DOWN)]
    assert room_for_replica(loads, slo_s=5.0, line_tokens=100, replicas=3) == 7
    assert room_for_replica(loads, slo_s=5.0, line_tokens=100, replicas=0) == 20
