"""Runs one trace through a live fleet of emulated instances and through the simulator: do they agree?

    python benchmarks/live_vs_simulated.py [--requests 2000] [--rate 4.5] [--instances 8] [--time-scale 5]
    python benchmarks/live_vs_simulated.py --report replay.json --requests ...   (a replay made before, same settings)

Starts ``dualmap up``, replays the trace through it, stops it, and runs the simulator with the same settings, hash keys
and instance names (requests are held in the fleet under any policy, as in a live fleet). Agreement: effective capacity
within 3 points, hit rate within 2 points; exit code 1 otherwise. A time scale magnifies the delays of a busy machine:
10 ms of the clock are 50 ms of an engine at 5.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.simulation.commands.options import policies_of
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.replay.routed_chains import routed_chains
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource

CAPACITY_POINTS = 3.0
HIT_POINTS = 2.0
READY_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures in which the two must agree, and some that explain a difference."""

    on_time: float
    hit_rate: float
    ttft_p50_s: float
    ttft_p90_s: float
    migrations: int | None


def main() -> int:
    arguments = _arguments()
    source = TraceSource(arguments.trace, arguments.requests, arguments.max_input_tokens)
    if arguments.report is not None:
        live = _live_figures(arguments.report)
    else:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "replay.json"
            with fleet(_words(arguments)) as url:
                _replay(arguments, url, report)
            live = _live_figures(report)
    trace, scenario = source.load(arguments.rate), _scenario(arguments)
    result = simulate(trace, scenario, chains=routed_chains(trace, _model(arguments), scenario.scheduling))
    return _compare(live, _simulated_figures(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="compare with this replay's JSON instead of making one")
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--max-input-tokens", type=int, default=20_480)
    parser.add_argument("--skip", type=int, default=200)
    parser.add_argument("--rate", type=float, default=4.5)
    parser.add_argument("--policy", default="dualmap")
    parser.add_argument("--queue-order", default="fifo", choices=("fifo", "deadline"))
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--preset", default="qwen2.5-7b-910b4")
    parser.add_argument("--time-scale", type=float, default=5.0)
    return parser.parse_args()


def _scenario(arguments: argparse.Namespace) -> Scenario:
    (policy,) = policies_of(arguments.policy)
    return Scenario(
        SchedulingSettings(policy=policy, queue_order=arguments.queue_order),
        find_preset(arguments.preset).engine,
        instances=arguments.instances,
        max_queued_requests=InstanceSpec("", "").max_queued_requests,
        skip_requests=arguments.skip,
        instance_name="instance-{}",
        output_limits_known=True,
    )


def _model(arguments: argparse.Namespace) -> str:
    return find_preset(arguments.preset).model


def _words(arguments: argparse.Namespace) -> list[str]:
    words = ["--replicas", str(arguments.replicas), "--instances", str(arguments.instances)]
    words += ["--policy", arguments.policy, "--preset", arguments.preset, "--time-scale", str(arguments.time_scale)]
    return [*words, "--scheduling.queue_order", arguments.queue_order, "--emulator.stream_interval", "64"]


@contextmanager
def fleet(words: Sequence[str]) -> Iterator[str]:
    """The URL of a fleet that ``dualmap up`` runs with these words; it stops with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "dualmap", "up", "--port", str(port), *words]
        running = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_ready(url, running)
            yield url
        finally:
            running.send_signal(signal.SIGTERM)
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
            if running.returncode not in (0, -signal.SIGTERM):
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-4000:])


def _wait_until_ready(url: str, running: subprocess.Popen[bytes]) -> None:
    """Ready means that a replica takes traffic and knows a model; raises TimeoutError."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if running.poll() is not None:
            raise RuntimeError(f"dualmap up ended with {running.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
                if json.load(answer)["data"]:
                    return
        except (urllib.error.URLError, OSError, ValueError):
            pass
        time.sleep(0.2)
    raise TimeoutError(f"the fleet at {url} was not ready within {READY_TIMEOUT_S:g} s")


def _replay(arguments: argparse.Namespace, url: str, report: Path) -> None:
    words = ["replay", "--url", url, "--trace", arguments.trace, "--requests", str(arguments.requests)]
    words += ["--max-input-tokens", str(arguments.max_input_tokens), "--rate", str(arguments.rate)]
    words += ["--skip", str(arguments.skip), "--time-scale", str(arguments.time_scale), "--json", str(report)]
    command = [sys.executable, "-m", "dualmap", *words, "--quiet"]
    ended = subprocess.run(command, check=False, env={**os.environ, "COLUMNS": "120"})
    if not report.exists():
        raise RuntimeError(f"dualmap replay ended with {ended.returncode}")  # 1 with a report: some were refused


def _live_figures(report: Path) -> Figures:
    row = json.loads(report.read_text())
    ttft = row["ttft_s"]
    return Figures(row["effective_capacity"], row["hit_rate"], ttft["p50"], ttft["p90"], row["migrations"])


def _simulated_figures(result: RunResult) -> Figures:
    ttft = result.ttft_s
    return Figures(result.effective_capacity, result.hit_rate, ttft.p50, ttft.p90, result.migrations)


def _compare(live: Figures, simulated: Figures) -> int:
    capacity_points = 100 * abs(live.on_time - simulated.on_time)
    hit_points = 100 * abs(live.hit_rate - simulated.hit_rate)
    print(f"{'':<12}{'on time':>9}{'hit':>8}{'TTFT P50':>10}{'P90':>8}{'migrated':>10}")
    for name, figures in (("live", live), ("simulated", simulated)):
        print(
            f"{name:<12}{figures.on_time:>9.1%}{figures.hit_rate:>8.1%}{figures.ttft_p50_s:>9.2f}s"
            f"{figures.ttft_p90_s:>7.2f}s{figures.migrations!s:>10}"
        )
    agree = capacity_points <= CAPACITY_POINTS and hit_points <= HIT_POINTS
    print(
        f"difference: on time {capacity_points:.1f} points (limit {CAPACITY_POINTS:g}), hit rate {hit_points:.1f} "
        f"(limit {HIT_POINTS:g}): {'agree' if agree else 'DISAGREE'}"
    )
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
