"""CPU of ``dualmap what-if`` of an hour, against two runs of ``dualmap simulate`` of another version.

    python benchmarks/what_if_cost.py [--other CHECKOUT] [--requests 36000] [--rate 10] [--instances 8] [--turns 1]
    python benchmarks/what_if_cost.py --keep FOLDER --mocker PYTHON

Two hours are recorded, from simulated engines that are as fast as their model says, and 1.25 times as slow: there
``what-if`` has to find the pace. ``--other`` is a checkout of another version with an environment in ``.venv``; none:
this version. What is compared takes turns; the least of each counts. CPU is that of all processes of a command.

``--mocker`` is the interpreter of an environment with ``ai-dynamo-runtime``, whose offline replay then runs the same
hour, with as many workers and as much KV memory, by its own model of an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.what_if.twin import TwinJob
from dualmap.simulation.workload.recording import render_mooncake
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Measured, Trace

MAX_INPUT_TOKENS = 20_480
SLOWER = 1.25
MOCKER = """
import json, sys, resource
from dynamo.replay.api import run_trace_replay
trace, workers, mode, engine = sys.argv[1:]
begun = resource.getrusage(resource.RUSAGE_SELF)
report = run_trace_replay(trace, extra_engine_args={"engine": json.loads(engine)}, num_workers=int(workers),
                          router_mode=mode, trace_block_size=512)
ended = resource.getrusage(resource.RUSAGE_SELF)
spent_s = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
print(1e6 * spent_s / report.summary["completed_requests"])
"""
CHANGE = {"scheduling": {"policy_options": {"recompute_weight": 8}}}


def main() -> int:
    arguments = _arguments()
    here = Path(__file__).parent.parent
    other = here if arguments.other is None else arguments.other
    with tempfile.TemporaryDirectory() as given:
        folder = arguments.keep or Path(given)
        hours = {name: _recorded(arguments, slower, folder) for name, slower in (("as fast", 1.0), ("slower", SLOWER))}
        if arguments.mocker is not None:
            _say_mocker(arguments, hours["as fast"])
            return 0
        change, said = folder / "change.json", folder / "said.json"
        change.write_text(json.dumps(CHANGE))
        fleet = ["--instances", str(arguments.instances), "--preset", arguments.preset, "--quiet"]
        simulate = ["simulate", "--trace", str(hours["as fast"]), *fleet]
        twice: list[float] = []
        spent: dict[str, list[float]] = {name: [] for name in hours}
        for _ in range(arguments.turns):
            twice.append(2 * _cpu_s(other, simulate))
            for name, hour in hours.items():
                what_if = ["what-if", "--recording", str(hour), "--change", str(change), *fleet, "--json", str(said)]
                spent[name].append(_cpu_s(here, what_if))
                print(f"{name}: the pace found is {json.loads(said.read_text())['pace']:.3f}", flush=True)
    print(f"two runs of simulate: {min(twice):.1f} s of CPU")
    for name, each_s in spent.items():
        print(f"what-if, engines {name}: {min(each_s):.1f} s of CPU, {min(each_s) / min(twice):.2f}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, metavar="CHECKOUT")
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--requests", type=int, default=36_000)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--preset", default="qwen3-8b-h100")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write the two recordings here")
    parser.add_argument("--mocker", metavar="PYTHON", help="compare with Dynamo's mocker")
    return parser.parse_args()


def _recorded(arguments: argparse.Namespace, slower: float, folder: Path) -> Path:
    """Record a fleet whose engines take so many times as long as their model says; returns the file."""
    trace: Trace = TraceSource(arguments.trace, arguments.requests, MAX_INPUT_TOKENS).load(arguments.rate)
    scenario = Scenario(SchedulingSettings(), find_preset(arguments.preset).engine, instances=arguments.instances)
    served = TwinJob(trace, scenario.slowed(slower)).run().outcomes
    requests = tuple(
        replace(request, measured=Measured(outcome.e2e_s, outcome.ttft_s, outcome.cached_tokens))
        for request, outcome in zip(trace.requests, served, strict=True)
    )
    path = folder / f"slower-{slower}.jsonl"
    path.write_text(render_mooncake(replace(trace, requests=requests)))
    return path


def _say_mocker(arguments: argparse.Namespace, hour: Path) -> None:
    """CPU a request of a mocker's replay, by the way it places requests and the size of its blocks."""
    tokens = find_preset(arguments.preset).engine.kv_capacity_tokens
    for mode in ("round_robin", "kv_router"):
        for block in (512, 16):
            engine = {"block_size": block, "num_gpu_blocks": tokens // block, "max_num_batched_tokens": 2048}
            words = [arguments.mocker, "-c", MOCKER, str(hour), str(arguments.instances), mode, json.dumps(engine)]
            quiet = {**os.environ, "DYN_LOG": "error"}  # a line of a log for each request is no part of a simulation
            ended = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=quiet)
            print(f"mocker, {mode}, blocks of {block}: {float(ended.stdout):.0f} µs a request", flush=True)


def _cpu_s(checkout: Path, words: Sequence[str]) -> float:
    """User and system time of a command of a version."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python = sys.executable if checkout == Path(__file__).parent.parent else str(checkout / ".venv/bin/python")
    subprocess.run(
        [python, "-m", "dualmap", *words],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
