"""Lines of batches beside interactive requests, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.batches.slack import SEQUENCES_PART
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import Simulation
from dualmap.simulation.workload.arrivals import Loop
from dualmap.simulation.workload.traces import Trace, TraceRequest

PEOPLE = tuple(TraceRequest(float(number), 2048, 20, (number,) * 4) for number in range(30))
LINES = tuple(TraceRequest(0.0, 600, 50, (1000, 2000 + number), priority="batch") for number in range(4000))
CLASSES = (PriorityClassSettings(name="default"), PriorityClassSettings(name="batch", slo_ttft_s=3600.0))


def done(loop: Loop, instances: int = 2) -> int:
    """The lines that were answered beside people, who all were."""
    engine = find_preset("qwen2.5-7b-910b4").engine
    scenario = Scenario(SchedulingSettings(classes=CLASSES), engine, instances, loop=loop)
    outcomes = Simulation(Trace("t", 512, (*PEOPLE, *LINES)), scenario).run().outcomes
    assert sum(each.input_tokens == 2048 and each.finish_s is not None for each in outcomes) == len(PEOPLE)
    return sum(each.input_tokens == 600 and each.finish_s is not None for each in outcomes)


def test_lines_fill_the_room_that_people_leave() -> None:
    few, many = done(Loop(lines="batch", lines_at_once=1)), done(Loop(lines="batch"))

    assert 0 < few < many < len(LINES)


def test_more_instances_have_more_room() -> None:
    assert done(Loop(lines="batch"), instances=4) > 1.5 * done(Loop(lines="batch"), instances=2)


def test_an_instance_has_no_more_sequences_for_lines_than_its_part() -> None:
    most = int(SEQUENCES_PART * find_preset("qwen2.5-7b-910b4").engine.max_num_seqs)
    fixed = done(Loop(lines="batch", lines_at_once=2 * most))

    assert done(Loop(lines="batch")) <= 1.2 * fixed


@pytest.mark.parametrize("by_class", [True, False])
def test_engines_that_schedule_by_priority_follow_that_of_the_class(by_class: bool) -> None:
    """Somebody comes when six prompts of batches were dispatched, each a step of the engine."""
    classes = (PriorityClassSettings(name="default"), PriorityClassSettings(name="batch", engine_priority=10))
    engine = replace(find_preset("qwen2.5-7b-910b4:by_priority").engine, max_num_batched_tokens=512)
    lines = (TraceRequest(0.0, 512, 5, (number,), priority="batch") for number in range(6))
    trace = Trace("t", 512, (*lines, TraceRequest(0.01, 512, 5, (99,))))
    scheduling = SchedulingSettings(classes=classes, engine_priorities=by_class)
    outcomes = Simulation(trace, Scenario(scheduling, engine, 1)).run().outcomes
    first = sorted(range(7), key=lambda number: outcomes[number].ttft_s + outcomes[number].arrival_s)
    assert first.index(6) == (1 if by_class else 6)
