"""First tokens over the time of a run, as lines of text."""

from __future__ import annotations

from math import inf

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.first_tokens import bars, first_tokens_over_time
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.workload.sources import TraceSource


def test_bars_go_from_nothing_to_the_highest_and_mark_what_never_came() -> None:
    assert bars([0.0, 1.0, 2.0, inf], 2.0) == "▁▅█×"


def test_an_overload_is_seen_to_grow() -> None:
    engine = find_preset("qwen2.5-7b-910b4").engine
    job = RunJob(TraceSource("toolagent", 300), Scenario(SchedulingSettings(), engine, instances=1), 8.0)

    head, p90, on_time = first_tokens_over_time(job.run(), 5.0).splitlines()

    assert head.startswith("first tokens over ")
    assert "(SLO 5 s)" in p90
    assert "█" in p90
    assert on_time.startswith("  on time  ")
