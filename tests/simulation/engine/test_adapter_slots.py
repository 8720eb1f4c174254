from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.simulation.engine.adapter_slots import AdapterCounts, AdapterMemory, AdapterSlots
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, EventKind
from dualmap.simulation.engine.presets import UnknownPresetError, find_preset

MEMORY = AdapterMemory(slots=2, host_slots=3, host_s=0.02, disk_s=0.5)
CONFIG = replace(find_preset("qwen2.5-7b-910b4").engine, adapters=MEMORY)


def ran(slots: AdapterSlots, *adapters: str) -> list[float]:
    """Times of the loads of requests that run one after the other."""
    taken = []
    for adapter in adapters:
        taken.append(slots.enter(adapter))
        slots.leave(adapter)
    return taken


def test_a_load_takes_its_share_of_the_usual_time() -> None:
    slots = AdapterSlots(AdapterMemory(1, 2, host_s=0.02, disk_s=0.5))

    assert slots.enter("one", 4.0) == pytest.approx(4 * 0.52)
    assert slots.enter("one", 4.0) == 0.0


def test_an_engine_starts_with_the_adapters_loaded_last_and_has_counted_no_load() -> None:
    slots = AdapterSlots(AdapterMemory(1, 2))

    slots.start_with(["one", "two", "three"])

    assert (slots.on_device, slots.in_host) == (("three",), ("two", "three"))
    assert slots.counts == AdapterCounts()


def test_what_was_used_longest_ago_leaves_the_device_and_then_host_memory() -> None:
    slots = AdapterSlots(MEMORY)

    assert ran(slots, "a", "b", "a", "c") == pytest.approx([0.52, 0.52, 0.0, 0.52])
    assert (slots.on_device, slots.in_host) == (("a", "c"), ("b", "a", "c"))
    assert ran(slots, "b", "d", "a") == pytest.approx([0.02, 0.52, 0.52])
    assert slots.counts == AdapterCounts(to_device=6, from_disk=5)


def test_adapters_of_running_requests_stay() -> None:
    slots = AdapterSlots(MEMORY)
    slots.enter("a")
    ran(slots, "b", "c", "d")

    assert slots.on_device == ("a", "d")
    assert slots.may_run("e")
    slots.enter("d")
    assert not slots.may_run("e")
    assert slots.may_run("a")


def test_an_engine_without_slots_has_every_adapter_at_hand() -> None:
    slots = AdapterSlots(AdapterMemory())

    assert slots.may_run("a")
    assert ran(slots, "a", "") == [0.0, 0.0]


def first_tokens(engine: Engine) -> dict[str, float]:
    found: dict[str, float] = {}
    while (at_s := engine.next_event_s()) is not None:
        found |= {each.request_id: each.time_s for each in engine.advance(at_s) if each.kind is EventKind.FIRST_TOKEN}
    return found


def submitted(config: EngineConfig, *adapters: str, output_tokens: int = 2) -> dict[str, float]:
    engine = Engine(config)
    for number, adapter in enumerate(adapters):
        engine.submit(EngineRequest(f"{number}{adapter}", 100, output_tokens, adapter=adapter), 0.0)
    return first_tokens(engine)


def test_a_load_stops_the_step_that_needs_it() -> None:
    (alone,), (loaded,) = submitted(CONFIG, "").values(), submitted(CONFIG, "a").values()

    assert loaded == pytest.approx(alone + 0.52)


def test_a_request_without_a_slot_waits_and_holds_up_nobody_behind_it() -> None:
    first = submitted(CONFIG, "a", "b", "c", "a", output_tokens=50)

    assert max(first["0a"], first["1b"], first["3a"]) < first["2c"]


def test_a_request_without_a_slot_counts_as_deferred_until_there_is_one() -> None:
    engine, deferred = Engine(CONFIG), []
    for number, adapter in enumerate(("a", "b", "c", "a")):
        engine.submit(EngineRequest(f"{number}{adapter}", 100, 50, adapter=adapter), 0.0)
    while (at_s := engine.next_event_s()) is not None:
        engine.advance(at_s)
        statistics = engine.statistics()
        deferred.append((statistics.deferred, statistics.waiting))

    assert (1, 1) in deferred
    assert deferred[-1] == (0, 0)


def test_a_preempted_or_aborted_request_gives_its_slot_back() -> None:
    engine = Engine(CONFIG)
    for name in ("a", "b", "c"):
        engine.submit(EngineRequest(name, 100, 50, adapter=name), 0.0)
    at_s = engine.next_event_s()
    assert at_s is not None
    engine.advance(at_s)
    waiting = engine.statistics().waiting
    engine.abort("a", at_s)

    assert waiting == 1
    assert "c" in first_tokens(engine)
    assert engine.statistics().adapters == ()


def test_a_preset_takes_room_for_adapters() -> None:
    room = find_preset("qwen2.5-7b-910b4:adapter_slots=4+adapter_host_slots=16+adapter_disk_ms=300").engine.adapters

    assert room == AdapterMemory(4, 16, 0.02, 0.3)
    assert find_preset("qwen2.5-7b-910b4:adapter_slots=4").engine.adapters.host_slots == 4
    with pytest.raises(UnknownPresetError, match="at least the adapters"):
        find_preset("qwen2.5-7b-910b4:adapter_slots=4+adapter_host_slots=2")
