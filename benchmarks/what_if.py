"""Forecasts changes of a live fleet from its recording, makes them, and measures: does ``dualmap what-if`` hold?

    python benchmarks/what_if.py [--requests 2000] [--rate 4.5] [--instances 8] [--time-scale 5] [--seed 1]

Runs ``dualmap up`` with emulated instances and a recording, replays a trace through it, and asks ``dualmap what-if``
about three changes: a setting, one instance less, another policy. Then it makes each change on a fleet of its own,
sends the same trace, and compares what was recorded there with the forecast. A forecast holds that is within 2 points
of the share on time and within 15 % of the TTFT P50; exit code 1 if one does not.

The times of the recordings are those of engines: the emulated instances run faster than the clock.

    python benchmarks/what_if.py --orders 10 [--requests 2000] [--policy round-robin] [--slower 1.05]

says how much of a difference is chance, without a live fleet: the same trace is simulated in ten orders of the requests
that come at one time, which a live fleet's routers place in an order of their own. The engines may be slower than
their model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from live_vs_simulated import fleet

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.what_if.comparison import ttft_quantile
from dualmap.simulation.what_if.measured import measured_outcomes
from dualmap.simulation.what_if.twin import TwinJob
from dualmap.simulation.workload.recording import merge_recordings, render_mooncake
from dualmap.simulation.workload.sources import TraceSource
from dualmap.simulation.workload.traces import Trace, read_trace

POINTS = 2.0
PERCENT = 15.0
SALT = "what-if"
_TIMES = ("timestamp", "ttft_ms", "duration_ms", "slo_ttft_ms")


@dataclass(frozen=True, slots=True)
class Change:
    """A change in the words of ``dualmap what-if`` and in those of ``dualmap up``."""

    name: str
    document: Mapping[str, object]
    words: Sequence[str]


@dataclass(frozen=True, slots=True)
class Figures:
    on_time: float
    ttft_p50_s: float


def changes(instances: int) -> tuple[Change, ...]:
    return (
        Change("as it is", {}, ()),
        Change(
            "recompute_weight is 8",
            {"scheduling": {"policy_options": {"recompute_weight": 8}}},
            ("--scheduling.policy_options", '{"recompute_weight": 8}'),
        ),
        Change("one instance less", {"fleet": {"instances": instances - 1}}, ("--instances", str(instances - 1))),
        Change("round-robin", {"scheduling": {"policy": "round-robin"}}, ("--policy", "round-robin")),
    )


def main() -> int:
    arguments = _arguments()
    if arguments.orders:
        _say_chance(arguments)
        return 0
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        as_it_is, *wanted = changes(arguments.instances)
        recording = _live(arguments, as_it_is, folder / "now")
        now = _measured(recording, arguments.skip_s)
        print(f"as it is, measured: {_words(now)}", flush=True)
        held = True
        for number, change in enumerate(wanted):
            twin, forecast = _forecast(arguments, recording, change, folder / f"{number}.yaml")
            live = _measured(_live(arguments, change, folder / f"then-{number}"), arguments.skip_s)
            points = 100 * (forecast.on_time - live.on_time)
            percent = 100 * (forecast.ttft_p50_s / live.ttft_p50_s - 1)
            holds = abs(points) <= POINTS and abs(percent) <= PERCENT
            held = held and holds
            relative = forecast.ttft_p50_s / twin.ttft_p50_s, live.ttft_p50_s / now.ttft_p50_s
            print(
                f"{change.name}: forecast {_words(forecast)}; measured {_words(live)}; error {points:+.1f} points, "
                f"{percent:+.0f} %: {'holds' if holds else 'DOES NOT HOLD'}; TTFT P50 was to be "
                f"{relative[0]:.2f} times what it was, and is {relative[1]:.2f} times",
                flush=True,
            )
    return 0 if held else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="conversation")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--max-input-tokens", type=int, default=20_480)
    parser.add_argument("--rate", type=float, default=4.5, help="requests per second of the engines' time")
    parser.add_argument("--instances", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--preset", default="qwen2.5-7b-910b4")
    parser.add_argument("--time-scale", type=float, default=5.0)
    parser.add_argument("--skip-s", type=float, default=60.0, help="the first seconds of engines' time warm the caches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--orders", type=int, default=0, help="say how much is chance, by so many simulated runs")
    parser.add_argument("--policy", default="round-robin", help="of these runs")
    parser.add_argument("--slower", type=float, default=1.0, help="their engines take so many times as long")
    return parser.parse_args()


def _say_chance(arguments: argparse.Namespace) -> None:
    """The figures of one policy in several orders of the requests that come at one time: in the trace hundreds do."""
    source = TraceSource(arguments.trace, arguments.requests, arguments.max_input_tokens, seed=arguments.seed)
    trace = source.load(arguments.rate)
    scheduling = SchedulingSettings(policy=arguments.policy)
    scenario = Scenario(scheduling, find_preset(arguments.preset).engine, instances=arguments.instances)
    scenario = scenario.slowed(arguments.slower)
    runs: list[Figures] = []
    for seed in range(arguments.orders):
        shaken = _shaken(trace, random.Random(seed))
        outcomes = [each for each in TwinJob(shaken, scenario).run().outcomes if each.arrival_s >= arguments.skip_s]
        runs.append(_figures(outcomes))
        print(f"order {seed}: {_words(runs[-1])}", flush=True)
    on_time, ttft_s = [100 * each.on_time for each in runs], [each.ttft_p50_s for each in runs]
    print(
        f"{arguments.policy}, {len(runs)} orders of {arguments.requests} requests: on time {mean(on_time):.1f} %,"
        f" standard deviation {stdev(on_time):.1f} points; TTFT P50 {mean(ttft_s):.2f} s, {stdev(ttft_s):.2f} s"
    )


def _shaken(trace: Trace, draws: random.Random) -> Trace:
    """The trace with each request up to 50 ms later."""
    later = [replace(each, arrival_s=each.arrival_s + 0.05 * draws.random()) for each in trace.requests]
    return replace(trace, requests=tuple(sorted(later, key=lambda each: each.arrival_s)))


def _words(figures: Figures) -> str:
    return f"on time {figures.on_time:.1%}, TTFT P50 {figures.ttft_p50_s:.2f} s"


def _live(arguments: argparse.Namespace, change: Change, folder: Path) -> Path:
    """The recording of the trace through a live fleet, in the engines' time, as one trace."""
    words = ["--replicas", str(arguments.replicas), "--instances", str(arguments.instances)]
    words += ["--preset", arguments.preset, "--time-scale", str(arguments.time_scale)]
    words += ["--emulator.stream_interval", "64", *change.words]
    words += ["--router.record_dir", str(folder), "--router.record_salt", SALT]
    with fleet(words) as url:
        send = ["replay", "--url", url, "--trace", arguments.trace, "--requests", str(arguments.requests)]
        send += ["--max-input-tokens", str(arguments.max_input_tokens), "--rate", str(arguments.rate)]
        send += ["--time-scale", str(arguments.time_scale), "--seed", str(arguments.seed), "--quiet"]
        _dualmap(send, exit_codes=(0, 1))
    for path in folder.glob("*.jsonl"):
        lines = [_scaled(json.loads(line), arguments.time_scale) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = folder.with_suffix(".jsonl")
    trace.write_text(render_mooncake(merge_recordings(sorted(folder.glob("*.jsonl")))))
    return trace


def _scaled(row: dict[str, float], time_scale: float) -> dict[str, float]:
    return row | {name: round(row[name] * time_scale) for name in _TIMES if name in row}


def _measured(recording: Path, skip_s: float) -> Figures:
    outcomes = measured_outcomes(read_trace(recording), SchedulingSettings())
    return _figures([outcome for outcome in outcomes if outcome.arrival_s >= skip_s])


def _figures(outcomes: Sequence[RequestOutcome]) -> Figures:
    p50_s = ttft_quantile(0.5)(outcomes)
    assert p50_s is not None
    return Figures(sum(outcome.on_time for outcome in outcomes) / len(outcomes), p50_s)


def _forecast(arguments: argparse.Namespace, recording: Path, change: Change, file: Path) -> tuple[Figures, Figures]:
    """The twin of the fleet as it is, and with the change."""
    file.write_text(json.dumps(change.document))
    out = file.with_suffix(".json")
    words = ["what-if", "--recording", str(recording), "--change", str(file), "--instances", str(arguments.instances)]
    words += ["--preset", arguments.preset, "--skip-s", str(arguments.skip_s), "--quiet", "--json", str(out)]
    print(_dualmap(words), flush=True)
    rows = json.loads(out.read_text())["differences"]
    by_name = {row["figure"]: row for row in rows if row["requests"] == "all requests"}
    on_time, ttft = by_name["on time"], by_name["TTFT P50"]
    return Figures(on_time["as_it_is"], ttft["as_it_is"]), Figures(on_time["then"], ttft["then"])


def _dualmap(words: Sequence[str], exit_codes: Sequence[int] = (0,)) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "dualmap", *words],
        check=False, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    if ended.returncode not in exit_codes:
        raise RuntimeError(f"dualmap {words[0]} ended with {ended.returncode}: {ended.stderr}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main())
