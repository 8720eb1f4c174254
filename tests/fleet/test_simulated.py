"""The simulator tells what a live fleet does: the same trace, the same settings, the same figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.replay.routed_chains import routed_chains
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource
from tests.fleet.fleet_process import running_fleet

TRACE, REQUESTS, CAP, RATE_PER_S, SKIP = "coding", 200, 20_480, 3.5, 20
INSTANCES = 4
TIME_SCALE = 4
FLEET_INSTANCE_NAME = "instance-{}"


LIVE_TRIES = 3
"""A busy machine makes a live run later than its engines are, and what comes late is placed otherwise: the first
undisturbed run counts."""

CAPACITY_TOLERANCE, HIT_RATE_TOLERANCE = 0.03, 0.02


def live_figures(directory: Path) -> tuple[dict[str, Any], str]:
    """What a replay through a fleet of its own reports, and the model's name."""
    report = directory / "replay.json"
    words = ("--instances", str(INSTANCES), "--replicas", "2", "--workers", "1", "--time-scale", str(TIME_SCALE))
    with running_fleet(directory, (*words, "--emulator.stream_interval", "64")) as fleet:
        fleet.replay(
            "--trace", TRACE, "--requests", str(REQUESTS), "--rate", str(RATE_PER_S),
            "--max-input-tokens", str(CAP), "--skip", str(SKIP), "--time-scale", str(TIME_SCALE), "--json", str(report),
        )  # fmt: skip
    return json.loads(report.read_text()), fleet.model


def simulated_figures(model: str) -> RunResult:
    trace = TraceSource(TRACE, REQUESTS, CAP).load(RATE_PER_S)
    scenario = Scenario(
        SchedulingSettings(),
        find_preset("qwen2.5-7b-910b4").engine,
        instances=INSTANCES,
        skip_requests=SKIP,
        instance_name=FLEET_INSTANCE_NAME,
        output_limits_known=True,
    )
    return simulate(trace, scenario, chains=routed_chains(trace, model, scenario.scheduling))


@pytest.mark.timeout(240)
def test_a_live_replay_and_a_simulated_run_agree(tmp_path: Path) -> None:
    for attempt in range(LIVE_TRIES):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        live, model = live_figures(directory)
        simulated = simulated_figures(model)
        assert live["failed"] == 0
        capacity_off = live["effective_capacity"] - simulated.effective_capacity
        hit_rate_off = live["hit_rate"] - simulated.hit_rate
        if capacity_off >= -CAPACITY_TOLERANCE and abs(hit_rate_off) <= HIT_RATE_TOLERANCE:
            break

    assert abs(capacity_off) <= CAPACITY_TOLERANCE
    assert abs(hit_rate_off) <= HIT_RATE_TOLERANCE
    assert simulated.hit_rate > 0.7, "a trace without reuse would show nothing"
    assert simulated.effective_capacity > 0.9, "nor would a fleet that is always late"
