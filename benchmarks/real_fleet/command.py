"""This fleet and other routers in turns before the same vLLM instances: a table that anybody can make on own hardware.

    python -m benchmarks.real_fleet --install-peers peers --trace toolagent_trace.jsonl --requests 600 --skip 100 \\
        --max-input-tokens 20480 --rates 16,21 --instances 8 --slo-s 3
    python -m benchmarks.real_fleet --host-tokens 400000 --trace documents --requests 2000 ...  # KV in host memory too
    python -m benchmarks.real_fleet --url http://gpu-0:8000 --url http://gpu-1:8000 --trace recording.jsonl ...
    python -m benchmarks.real_fleet --emulated --time-scale 5 --trace toolagent --requests 300    # without any card

It starts the instances once: one a card, several on a card by NVIDIA's multi-process service, or none where --url gives
running ones. Then each router runs alone before them: it starts, gets a few requests to warm up, then the trace at the
wanted rate, and ends. Every run has texts of its own, so that no cache of another run helps, and the same arrivals.
Further rounds begin with another router. --out gets table.md, results.json, a picture for each rate, the requests of
every run, and all logs. What a router does not report, or the system cannot measure, is left empty.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from dualmap.research.provenance import Provenance
from dualmap.simulation.commands.options import (
    OptionError,
    add_loop_arguments,
    add_trace_arguments,
    loop_of,
    rates_of,
    trace_source,
)
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.figures.on_time import TPOT_SLO_S
from dualmap.simulation.figures.plots import PlottingUnavailableError
from dualmap.simulation.replay.replay_bodies import Endpoint
from dualmap.simulation.workload.recording import render_mooncake
from real_fleet import instances as instances_options
from real_fleet import routers as routers_options
from real_fleet.errors import LackingError
from real_fleet.instances import Instances, cards_for, instances_of
from real_fleet.machine import cards_here, describe_machine, machine_sentence
from real_fleet.processes import ROOT, cpu_s
from real_fleet.results import RECORDS, TABLE, Results, Run, joined, pictures, rate_title, rows_of, table
from real_fleet.routers import KINDS, chosen, install_peers, load_errors, router_of, versions

LACKS = 2
SOME_FAILED = 1
_FASTEST_WARM_UP_PER_S = 50.0
"""For a trace whose requests arrive all at once."""


def main(words: Sequence[str]) -> int:
    """Exit code 0: every run has figures; 1: one has none; 2: something is missing, or an option is wrong."""
    options = _options(words)
    try:
        if options.from_folders:
            return _again(options.from_folders, options.out)
        return _compare(options, words)
    except (LackingError, SimulationError) as error:
        print(f"real_fleet: {error}", file=sys.stderr)
        return LACKS


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_trace_arguments(parser)
    add_loop_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--rates", "--rate", metavar="R[,R…]", help="mean requests per second (none: the trace's times)")
    load.add_argument("--rounds", type=int, default=1, metavar="N", help="each router so many times at each rate")
    load.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N out of the figures")
    load.add_argument(
        "--warm-up", type=int, default=40, metavar="N", help="requests through each router before its run"
    )
    load.add_argument("--slo-s", type=float, default=5.0, metavar="S", help="TTFT SLO")
    load.add_argument("--slo-tpot-ms", type=float, default=TPOT_SLO_S * 1000, metavar="MS", help="SLO a token")
    load.add_argument(
        "--send-as", choices=[endpoint.value for endpoint in Endpoint], default=Endpoint.COMPLETIONS.value,
        help="form of the requests; completions have exactly the trace's lengths",
    )  # fmt: skip
    load.add_argument("--timeout-s", type=float, default=300.0, metavar="S", help="time for one answer")
    load.add_argument("--salt", default="", help="another salt, other texts: for instances that ran this before")
    instances_options.add_arguments(parser)
    routers_options.add_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("real-fleet"), metavar="DIR", help="folder of the results")
    output.add_argument(
        "--within-s", type=float, metavar="S", help="begin no run that would end later than so many seconds from now"
    )
    output.add_argument(
        "--from",
        dest="from_folders",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="write table and pictures of results again; of several folders, their rounds together, to --out",
    )
    return parser.parse_args(words)


def _compare(options: argparse.Namespace, words: Sequence[str]) -> int:
    started_s = time.monotonic()
    _check(options)
    if options.install_peers is not None:
        install_peers(options.install_peers)
        options.peers = options.install_peers
    names, rates = chosen(options.routers, options.peers), rates_of(options.rates)
    cards = cards_for(options, cards_here())
    trace = trace_source(options).load(rates[0])
    if options.skip >= len(trace.requests):
        raise OptionError(f"--skip {options.skip} leaves nothing of {len(trace.requests)} requests")
    folder = options.out.resolve()
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    machine = describe_machine(cards)
    made = replace(Provenance.here(()), command=shlex.join(("python", "-m", "benchmarks.real_fleet", *words)))
    starting_s = time.monotonic()
    with instances_of(options, cards, folder) as instances:
        _say(f"{instances.described}: ready after {time.monotonic() - starting_s:.0f} s")
        results = Results(
            provenance={"commit": made.commit, "date": made.date, "command": made.command},
            machine=machine,
            machine_sentence=machine_sentence(machine),
            set_up=_set_up(options, instances, names, len(trace.requests)),
            slo_ttft_s=options.slo_s,
            slo_tpot_s=options.slo_tpot_ms / 1000,
            skip_requests=options.skip,
            time_scale=instances.time_scale,
            runs=(),
            concurrency=options.concurrency,
            skip_s=options.skip_s,
        )
        deadline_s = None if options.within_s is None else started_s + options.within_s
        for turn, rate, name in _turns(names, rates, options.rounds, deadline_s):
            run = _run(name, rate, turn, instances, options, folder)
            results = replace(results, runs=(*results.runs, run))
            results.write(folder)  # a comparison that is interrupted keeps what it has
    return _finish(results, folder)


def _check(options: argparse.Namespace) -> None:
    positive = {
        "--rounds": options.rounds, "--slo-s": options.slo_s, "--slo-tpot-ms": options.slo_tpot_ms,
        "--timeout-s": options.timeout_s, "--time-scale": options.time_scale, "--replicas": options.replicas,
        "--workers": options.workers, "--instances": 1 if options.instances is None else options.instances,
    }  # fmt: skip
    for name, value in positive.items():
        if not 0 < value < float("inf"):
            raise OptionError(f"{name} must be more than 0, found {value}")
    loop_of(options)
    if options.concurrency is not None and options.rates is not None:
        raise OptionError("--concurrency has no rate: leave out --rates")
    if options.skip < 0 or options.warm_up < 0:
        raise OptionError("--skip and --warm-up must be at least 0")
    if options.time_scale != 1 and not options.emulated:
        raise OptionError("--time-scale is for --emulated instances alone")


def _turns(
    names: Sequence[str], rates: Sequence[float | None], rounds: int, deadline_s: float | None
) -> Iterator[tuple[int, float | None, str]]:
    """(round, rate, router); each round begins with another router. Ends before a run as long as the longest so far
    would pass the deadline."""
    longest_s = 0.0
    for turn in range(1, rounds + 1):
        for rate in rates:
            first = (turn - 1) % len(names)
            for name in (*names[first:], *names[:first]):
                before_s = time.monotonic()
                if deadline_s is not None and before_s + longest_s > deadline_s:
                    _say("the time is over: no further runs")
                    return
                yield turn, rate, name
                longest_s = max(longest_s, time.monotonic() - before_s)


def _run(
    name: str, rate: float | None, turn: int, instances: Instances, options: argparse.Namespace, folder: Path
) -> Run:
    run = Run(name, rate, turn)
    salt = f"--salt={options.salt}-{turn}-{rate_title(rate)}-{name}"
    try:
        with router_of(name, instances, options, folder) as router:
            if options.warm_up:
                _replay(
                    options, instances, router.url, ["--trace", str(_warm_up(options, rate, folder)), f"{salt}-warm-up"]
                )
            before_s = cpu_s(router.pid)
            records, page = folder / RECORDS / run.records, folder / RECORDS / run.records.replace(".jsonl", ".json")
            page.unlink(missing_ok=True)  # of a former comparison into this folder
            words = ["--json", str(page), "--records", str(records), salt, "--skip", str(options.skip)]
            ended = _replay(options, instances, router.url, [*_trace_words(options, rate), *words])
            if not page.exists():
                raise LackingError(ended)
            after_s = cpu_s(router.pid)
            knows_tiers = instances.host_tokens is not None and name.partition(":")[0] not in KINDS
            errors = load_errors(router.url, instances) if knows_tiers else []
    except LackingError as error:
        run = replace(run, failure=str(error))
        _say(f"{name}: no figures: {error}")
        return run
    report = _read(page)
    run = replace(
        run,
        cpu_s=None if before_s is None or after_s is None else after_s - before_s,
        on_time=report["effective_capacity"],
        both_slos=report["both_slos"],
        answers_per_s=report["answers_per_s"],
        load_error=median(errors) if errors else None,
        p99_lag_s=report["p99_lag_s"],
    )
    ttft = report["ttft_s"]
    _say(
        f"round {turn}, {rate_title(rate)}/s, {name}: on time {report['effective_capacity']:.1%}, TTFT P50 "
        f"{ttft['p50']:.2f} s, P99 {ttft['p99']:.2f} s, both {report['both_slos']:.1%}, failed {report['failed']}"
    )
    return run


def _warm_up(options: argparse.Namespace, rate: float | None, folder: Path) -> Path:
    """A file with the trace's first requests at even distances: a burst of a trace has no rate of its own."""
    trace = trace_source(options).load(rate)
    distance_s = 1 / min(trace.rate_per_s, _FASTEST_WARM_UP_PER_S)
    few = trace.requests[: options.warm_up]
    spaced = tuple(replace(request, arrival_s=number * distance_s) for number, request in enumerate(few))
    path = folder / f"warm-up-{rate_title(rate)}.jsonl"
    path.write_text(render_mooncake(replace(trace, requests=spaced)))
    return path


def _trace_words(options: argparse.Namespace, rate: float | None) -> list[str]:
    trace = Path(options.trace)
    words = ["--trace", str(trace.resolve()) if trace.exists() else options.trace, "--seed", str(options.seed)]
    own = (
        ("requests", options.requests), ("max-input-tokens", options.max_input_tokens),
        ("block-tokens", options.block_tokens), ("rate", rate), ("concurrency", options.concurrency),
        ("seconds", options.seconds), ("skip-s", options.skip_s),
    )  # fmt: skip
    words += [word for name, value in own if value is not None for word in (f"--{name}", str(value))]
    return [*words, "--open-loop"] if options.open_loop else words


def _replay(options: argparse.Namespace, instances: Instances, url: str, further: Sequence[str]) -> str:
    """How it ended, for people. Requests that fail are part of its report."""
    words = ["replay", "--quiet", "--url", url, "--model", instances.model, "--send-as", options.send_as]
    words += ["--slo-s", str(options.slo_s), "--slo-tpot-ms", str(options.slo_tpot_ms)]
    words += ["--time-scale", str(instances.time_scale), "--timeout-s", str(options.timeout_s)]
    command = [sys.executable, "-m", "dualmap", *words, *further]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"dualmap replay ended with {done.returncode}: {(done.stderr.splitlines() or [''])[-1]}"


def _set_up(options: argparse.Namespace, instances: Instances, names: Sequence[str], requests: int) -> dict[str, str]:
    fleet = f"router replicas: {options.replicas}, workers: {options.workers}"
    fleet += ", KV events" if instances.kv_events is not None else ", no KV events"
    fleet += ", the instances' tokenizer" if instances.tokenizer == "instances" else ", the model's tokenizer"
    others = [f"{name} {version}, one process" for name, version in versions(names, options.peers).items()]
    cut = "" if options.max_input_tokens is None else f", prompts cut to {options.max_input_tokens:,} tokens"
    load = (
        f"{_load(options, requests)} of {Path(options.trace).name}{cut}, the first {_left_out(options)} left out of "
        "the figures, "
        f"sent as {options.send_as}; new texts for every run, after {options.warm_up} requests to warm up"
    )
    said = {"Instances": instances.described, "Fleet": fleet}
    if others:
        said["Others"] = "; ".join(others) + ", default options"
    return {**said, "Load": load}


def _load(options: argparse.Namespace, requests: int) -> str:
    clients = "" if options.concurrency is None else f"{options.concurrency} clients, "
    time = f"those within {options.seconds:g} s of " if options.seconds is not None else ""
    return f"{clients}{time}{requests} requests"


def _left_out(options: argparse.Namespace) -> str:
    return f"{options.skip_s:g} s" if options.skip_s else str(options.skip)


def _again(folders: Sequence[Path], out: Path) -> int:
    """Table and pictures of what was measured before."""
    if len(folders) == 1:
        return _finish(Results.read(folders[0]), folders[0])
    (out / RECORDS).mkdir(parents=True, exist_ok=True)
    results = joined(folders, out)
    results.write(out)
    return _finish(results, out)


def _finish(results: Results, folder: Path) -> int:
    """Write table and pictures."""
    rows = rows_of(results, folder)
    written = table(results, rows)
    (folder / TABLE).write_text(written)
    try:
        for name, picture in pictures(results, rows).items():
            (folder / name).write_text(picture)
    except PlottingUnavailableError as error:
        _say(f"no pictures: {error}")
    print(written)
    return SOME_FAILED if any(run.failure for run in results.runs) else 0


def _read(page: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(page.read_text())
    return report


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
