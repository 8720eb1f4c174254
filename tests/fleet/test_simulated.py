"""The simulator tells what a live fleet does: the same trace, the same settings, the same figures."""

from __future__ import annotations

import json
from pathlib import Path

from fleet_process import running_fleet

from scheduling.settings import SchedulingSettings
from simulation.presets import find_preset
from simulation.routed_chains import routed_chains
from simulation.scenario import Dispatch, Scenario
from simulation.simulate import simulate
from simulation.sources import TraceSource

TRACE, REQUESTS, CAP, RATE_PER_S, SKIP = "coding", 200, 20_480, 3.5, 20
INSTANCES = 4
TIME_SCALE = 4
FLEET_INSTANCE_NAME = "instance-{}"


def test_a_live_replay_and_a_simulated_run_agree(tmp_path: Path) -> None:
    report = tmp_path / "replay.json"
    words = ("--instances", str(INSTANCES), "--replicas", "2", "--workers", "1", "--time-scale", str(TIME_SCALE))

    with running_fleet(tmp_path, (*words, "--emulator.stream_interval", "64")) as fleet:
        fleet.dualmap(
            "replay", "--url", fleet.endpoint, "--trace", TRACE, "--requests", str(REQUESTS), "--rate", str(RATE_PER_S),
            "--max-input-tokens", str(CAP), "--skip", str(SKIP), "--time-scale", str(TIME_SCALE), "--json", str(report),
        )  # fmt: skip
    live = json.loads(report.read_text())
    trace = TraceSource(TRACE, REQUESTS, CAP).load(RATE_PER_S)
    engine = find_preset("qwen2.5-7b-910b4").engine
    scenario = Scenario(
        SchedulingSettings(),
        engine,
        instances=INSTANCES,
        dispatch=Dispatch.HOLD,
        skip_requests=SKIP,
        instance_name=FLEET_INSTANCE_NAME,
        output_limits_known=True,
    )
    chains = routed_chains(trace, fleet.model, scenario.scheduling)
    simulated = simulate(trace, scenario, chains=chains)

    assert live["failed"] == 0
    assert abs(live["effective_capacity"] - simulated.effective_capacity) <= 0.03
    assert abs(live["hit_rate"] - simulated.hit_rate) <= 0.02
    assert simulated.hit_rate > 0.7, "a trace without reuse would show nothing"
    assert simulated.effective_capacity > 0.9, "nor would a fleet that is always late"
