from __future__ import annotations

from dataclasses import replace

from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.floors import Floors
from dualmap.scheduling.queues.queue_order import PlanStep
from dualmap.scheduling.queues.rebalance import HotQueue
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.classes import class_band

CLASSES = (
    PriorityClassSettings(name="interactive"),
    PriorityClassSettings(name="default"),
    PriorityClassSettings(name="batch", floor=0.1),
)
ORDER = queue_order_of(SchedulingSettings(classes=CLASSES))
LOAD = InstanceLoad("a", InstanceState.READY, prefill_tokens_per_s=1000.0, version=7)
NOW_MS = 1_000_000
BATCH = class_band(2)


def waiting(name: str, tokens: int, since_ms: int, band: int = BATCH) -> StoredRequest:
    held = StoredRequest(
        name,
        "one",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=tokens,
        prompt_tokens=tokens,
        expected_output_tokens=10,
        slo_ms=5000,
        enqueued_ms=since_ms,
    )
    return replace(held, band=band, deferred=True)


def queue(now_ms: int, *held: StoredRequest) -> HotQueue:
    return HotQueue(now_ms, LOAD, held, {})


def dispatched(steps: tuple[PlanStep, ...]) -> list[str]:
    return [step.request_id for step in steps]


def test_the_oldest_are_dispatched_at_the_rate_of_the_floor() -> None:
    floors = Floors(ORDER)
    held = [waiting("newer", 100, 20, BATCH + 3), waiting("oldest", 150, 10), waiting("other", 100, 5, class_band(1))]

    assert floors.plan(queue(NOW_MS, *held)).steps == ()
    assert floors.plan(queue(NOW_MS + 1000, *held)).steps == ()
    plan = floors.plan(queue(NOW_MS + 1500, *held))

    assert (plan.instance_id, plan.version) == ("a", 7)
    assert plan.steps == (PlanStep("oldest"),)
    assert dispatched(floors.plan(queue(NOW_MS + 2500, held[0])).steps) == ["newer"]


def test_nothing_is_saved_up_while_nothing_waits() -> None:
    floors = Floors(ORDER)
    assert floors.plan(queue(NOW_MS)).steps == ()
    assert floors.plan(queue(NOW_MS + 60_000, waiting("late", 100, 10))).steps == ()


def test_nothing_is_owed_for_a_time_in_which_the_instance_held_nothing() -> None:
    floors = Floors(ORDER)
    held = waiting("old", 100, 10)
    assert floors.plan(queue(NOW_MS, held)).steps == ()
    floors.keep(["a", "b"])
    assert dispatched(floors.plan(queue(NOW_MS + 1000, held)).steps) == ["old"]

    assert floors.plan(queue(NOW_MS + 2000, held)).steps == ()
    floors.keep(["b"])
    assert floors.plan(queue(NOW_MS + 60_000, held)).steps == ()


def test_there_is_nothing_to_do_without_floors() -> None:
    assert Floors(ORDER)
    assert not Floors(queue_order_of(SchedulingSettings(classes=CLASSES[:2])))
    assert not Floors(queue_order_of(SchedulingSettings()))
    assert not Floors(queue_order_of(SchedulingSettings(classes=CLASSES, queue_order="fifo")))


def test_an_instance_that_runs_as_many_as_it_may_is_given_none() -> None:
    floors, full = Floors(ORDER), replace(LOAD, running_requests=LOAD.max_running_requests)
    held = (waiting("old", 100, 10),)
    floors.plan(HotQueue(NOW_MS, full, held, {}))

    assert floors.plan(HotQueue(NOW_MS + 5000, full, held, {})).steps == ()
    assert dispatched(floors.plan(queue(NOW_MS + 5001, *held)).steps) == ["old"]
