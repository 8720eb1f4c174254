from dataclasses import replace

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.errors import ScenarioError
from dualmap.simulation.virtual_time.program_pauses import BUFFER_TOKENS, FORCED_AFTER_S, ProgramPauses
from dualmap.simulation.virtual_time.scenario import Dispatch, Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.sources import TraceSource

ROOM = 1000 + BUFFER_TOKENS
"""An instance holds one program of 1,000 tokens."""


def test_a_new_program_goes_where_there_is_most_room_and_stays_there() -> None:
    pauses = ProgramPauses({"a": 2 * ROOM, "b": 3 * ROOM})

    assert pauses.arrives("one", 0, 1000, 0.0) == "b"
    pauses.ended("one", 1000, is_last=False)
    assert pauses.arrives("two", 1, 200, 1.0) == "a"
    assert pauses.arrives("one", 2, 1500, 2.0) == "b"


def test_a_program_without_room_waits_until_another_one_has_ended() -> None:
    pauses = ProgramPauses({"a": ROOM})
    assert pauses.arrives("one", 0, 1000, 0.0) == "a"
    assert pauses.arrives("two", 1, 1000, 1.0) is None
    assert pauses.tick(5.0) == []

    pauses.ended("one", 1000, is_last=True)

    assert pauses.tick(10.0) == [(1, "a")]


def test_where_programs_grow_beyond_the_memory_the_smallest_at_a_tool_is_paused() -> None:
    pauses = ProgramPauses({"a": 2 * ROOM})
    for number, (name, tokens) in enumerate((("large", 900), ("small", 400), ("works", 300))):
        assert pauses.arrives(name, number, tokens, 0.0) == "a"
    pauses.ended("large", 1100, is_last=False)
    pauses.ended("small", 600, is_last=False)

    assert pauses.tick(5.0) == []

    assert pauses.arrives("large", 3, 1100, 6.0) == "a"
    assert pauses.arrives("small", 4, 600, 6.0) is None
    pauses.ended("works", 300, is_last=True)
    assert pauses.tick(10.0) == [(4, "a")]


def test_a_program_at_work_pauses_when_its_turn_ends() -> None:
    pauses = ProgramPauses({"a": ROOM})
    assert pauses.arrives("one", 0, 900, 0.0) == "a"
    pauses.ended("one", 900, is_last=False)
    assert pauses.arrives("one", 1, 1100, 1.0) == "a"
    assert pauses.tick(5.0) == []

    pauses.ended("one", 1100, is_last=False)

    assert pauses.arrives("one", 2, 1200, 6.0) is None
    assert pauses.tick(7.0) == [], "it never fits"
    assert pauses.tick(7.0 + FORCED_AFTER_S) == [(2, "a")]


def test_those_that_were_begun_go_before_new_ones() -> None:
    pauses = ProgramPauses({"a": 2 * ROOM})
    assert pauses.arrives("begun", 0, 900, 0.0) == "a"
    assert pauses.arrives("works", 1, 900, 0.0) == "a"
    pauses.ended("begun", 1200, is_last=False)
    assert pauses.tick(5.0) == []
    assert pauses.arrives("new", 2, 1150, 6.0) is None
    assert pauses.arrives("begun", 3, 1200, 7.0) is None

    pauses.ended("works", 900, is_last=True)

    assert pauses.tick(10.0) == [(3, "a")]


def test_every_turn_of_a_simulated_fleet_is_answered() -> None:
    engine = replace(find_preset("qwen2.5-7b-910b4").engine, kv_capacity_tokens=100_000)
    scenario = Scenario(
        SchedulingSettings(policy="llm-d"), engine, instances=2, loop=Loop(40, seconds=60.0),
        dispatch=Dispatch.DIRECT, pauses_programs=True,
    )  # fmt: skip

    record = Simulation(TraceSource("tasks", 1000).load(), scenario).run()

    assert all(outcome.answered for outcome in record.outcomes)
    assert any(outcome.held_s > 0 for outcome in record.outcomes)
    assert max(outcome.held_s for outcome in record.outcomes) < 100, "clients that stop report their runs as ended"


def test_it_excludes_the_fleets_own_admission() -> None:
    with pytest.raises(ScenarioError, match="admit_runs and pauses_programs: one of the two"):
        Scenario(SchedulingSettings(admit_runs=True), find_preset("qwen2.5-7b-910b4").engine, pauses_programs=True)
