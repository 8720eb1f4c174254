"""``dualmap simulate``: policies over rates, in virtual time; ``dualmap simulate goodput``: how far each can go;
``dualmap simulate size``: how many instances of which engine a trace needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from math import inf
from pathlib import Path

import orjson
from rich.progress import Progress

from dualmap.simulation.capacity.bounds import bounds_of, short_trace_note
from dualmap.simulation.capacity.fleet_size import FleetSize, FleetSizeJob, run_fleet_size
from dualmap.simulation.capacity.goodput import ON_TIME_SHARE, Goodput, GoodputJob, run_goodput
from dualmap.simulation.commands.options import (
    ConfiguredFleet,
    FleetOptions,
    OptionError,
    add_fleet_arguments,
    add_loop_arguments,
    add_output_arguments,
    add_tenant_arguments,
    add_trace_arguments,
    exit_code,
    fleet_options,
    presets_of,
    rates_of,
    trace_source,
    write_whole,
)
from dualmap.simulation.commands.progress import over_runs, progress_bars
from dualmap.simulation.commands.simulate_tenants import run_tenants
from dualmap.simulation.commands.tables import changes_table, goodput_table, results_table, roles_table, size_table
from dualmap.simulation.figures.first_tokens import first_tokens_over_time
from dualmap.simulation.figures.on_time import TPOT_SLO_S
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.virtual_time.runs import RunJob, map_jobs, run_all
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "mode", nargs="?", choices=("run", "goodput", "size"), default="run",
        help="run the trace at each rate; or search the highest rate with enough requests on time; or the smallest "
        "fleet, of each engine that --preset lists",
    )  # fmt: skip
    add_trace_arguments(parser)
    add_tenant_arguments(parser)
    add_loop_arguments(parser)
    add_fleet_arguments(parser)
    parser.add_argument("--rate", metavar="R[,R…]", help="requests per second (none: the trace's own; goodput: start)")
    parser.add_argument(
        "--on-time", type=float, default=ON_TIME_SHARE, help="goodput, size: share that must be on time"
    )
    parser.add_argument(
        "--p99-s", type=float, metavar="S",
        help="size: what the P99 of the first token must not pass (none: three times the SLO, or twice that of prompts "
        "prefilled alone)",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.01, help="goodput: relative width at which to stop")
    add_output_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots (SVG) here; needs matplotlib")


def run(arguments: argparse.Namespace, configured: ConfiguredFleet) -> int:
    return exit_code("simulate", lambda: _run(arguments, configured))


def _run(arguments: argparse.Namespace, configured: ConfiguredFleet) -> int:
    if arguments.mode == "size":
        return _size(arguments, configured)
    options = fleet_options(arguments, configured)
    if arguments.tenants:
        return run_tenants(arguments, options)
    rates = rates_of(arguments.rate)
    source = trace_source(arguments)
    requests = len(source.load().requests)
    if options.skip_requests >= requests:
        raise OptionError(f"--skip {options.skip_requests} leaves nothing of {requests} requests")
    if options.loop.concurrency is not None and (arguments.mode == "goodput" or arguments.rate is not None):
        raise OptionError("--concurrency has no rate: leave out --rate, and goodput")
    if arguments.plots is not None and arguments.mode == "run":
        from dualmap.simulation.figures.plots import require_matplotlib

        require_matplotlib()
    if arguments.mode == "goodput":
        return _goodput(arguments, options, source, rates[0])
    return _rates(arguments, options, source, rates)


def _rates(
    arguments: argparse.Namespace, options: FleetOptions, source: TraceSource, rates: tuple[float | None, ...]
) -> int:
    jobs = [RunJob(source, options.scenario(policy), rate) for rate in rates for policy in options.policies]
    console = terminal()
    if len(jobs) == 1:
        results = [_run_alone(jobs[0], arguments.quiet)]
    else:
        with progress_bars(arguments.quiet) as progress:
            requests = len(source.load().requests)
            results = run_all(jobs, arguments.workers, over_runs(progress, len(jobs), requests))
    console.print(results_table(results, console.width))
    if len(results) == 1:
        _show_first_tokens(results[0], options.scheduling.slo_ttft_s)
    if len(results) == 1 and results[0].changes:
        console.print(changes_table(results[0].changes))
    if len(results) == 1 and results[0].role_changes:
        console.print(roles_table(results[0].role_changes))
    if arguments.json is not None:
        write_whole(arguments.json, orjson.dumps(results, default=asdict, option=_JSON).decode())
    if arguments.plots is not None:
        _write_plots(results, arguments.plots)
    return 0


_JSON = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS


def _run_alone(job: RunJob, quiet: bool) -> RunResult:
    """One run in this process, its progress by requests."""
    with progress_bars(quiet) as progress:
        task = progress.add_task("reading the trace", total=None)
        trace = job.source.load(job.rate_per_s)
        progress.update(task, description="requests", total=len(trace.requests))
        hear: Callable[[int], None] = lambda arrived: progress.update(task, completed=arrived)  # noqa: E731
        result = simulate(trace, job.scenario, hear)
        progress.update(task, completed=len(trace.requests))
    return result


def _goodput(
    arguments: argparse.Namespace, options: FleetOptions, source: TraceSource, start_per_s: float | None
) -> int:
    if not 0 < arguments.on_time <= 1 or not 0 < arguments.tolerance < 1:
        raise OptionError("--on-time must be in (0, 1], --tolerance in (0, 1)")
    engine = options.engine
    searches = [
        GoodputJob(RunJob(source, options.scenario(policy), start_per_s), arguments.on_time, arguments.tolerance)
        for policy in options.policies
    ]
    with progress_bars(arguments.quiet) as progress:
        if len(searches) == 1:
            goodputs = [_search_alone(searches[0], progress)]
        else:
            searching = map_jobs(run_goodput, searches, arguments.workers)
            goodputs = list(progress.track(searching, len(searches), description="searches"))
        found = list(zip(options.policies, goodputs, strict=True))
        progress.add_task("bounds", total=None)
        slo_s = options.scheduling.slo_ttft_s
        trace, share, skip = source.load(), arguments.on_time, arguments.skip
        bounds = bounds_of(trace, engine, options.instances, slo_s, share=share, skip=skip)
    terminal().print(goodput_table(found, bounds))
    above = [policy for policy, goodput in found if goodput.rate_per_s > bounds.sustainable_per_s]
    if note := short_trace_note(above):
        terminal().print(note, highlight=False)
    if arguments.json is not None:
        rows = [{"policy": policy, **asdict(goodput)} for policy, goodput in found]
        document = {"on_time": arguments.on_time, **asdict(bounds), "goodput": rows}
        write_whole(arguments.json, orjson.dumps(document, option=_JSON).decode())
    return 0


def _size(arguments: argparse.Namespace, configured: ConfiguredFleet) -> int:
    if not 0 < arguments.on_time <= 1:
        raise OptionError("--on-time must be in (0, 1]")
    if arguments.p99_s is not None and not 0 < arguments.p99_s < inf:
        raise OptionError("--p99-s takes a number of seconds above 0")
    for option in ("instances", "roles", "autoscale"):
        if getattr(arguments, option) is not None:
            raise OptionError(f"--{option} has no meaning here: the size is what is looked for")
    presets = presets_of(arguments.preset or configured.engine.preset)
    slo_tpot_ms = 1000 * TPOT_SLO_S if arguments.slo_tpot_ms is None else arguments.slo_tpot_ms
    given = {"preset": None, "instances": 1, "slo_tpot_ms": slo_tpot_ms}
    alone = argparse.Namespace(**{**vars(arguments), **given})
    options, source, rate_per_s = fleet_options(alone, configured), trace_source(arguments), rates_of(arguments.rate)[0]
    searches = [
        FleetSizeJob(
            preset.name, preset.cards,
            RunJob(source, replace(options.scenario(policy), engine=preset.engine), rate_per_s), arguments.on_time,
            arguments.p99_s,
        )
        for preset in presets for policy in options.policies
    ]  # fmt: skip
    with progress_bars(arguments.quiet) as progress:
        if len(searches) == 1:
            found = [_size_alone(searches[0], progress)]
        else:
            searching = map_jobs(run_fleet_size, searches, arguments.workers)
            found = list(progress.track(searching, len(searches), description="searches"))
    console = terminal()
    console.print(size_table(searches, found))
    both = f"{options.scheduling.slo_ttft_s:g} s to the first token, {slo_tpot_ms:g} ms per output token"
    console.print(f"on time: {arguments.on_time:.0%} of the requests are to keep both SLOs: {both}", highlight=False)
    for search, size in zip(searches, found, strict=True):
        bound = f"the P99 of the first token may be {size.p99_limit_s:.1f} s"
        said = f"no number of instances holds, {size.why_not}" if size.why_not else bound
        console.print(f"{search.name}: {said}", highlight=False)
    if len(found) == 1:
        _show_first_tokens(found[0].result, options.scheduling.slo_ttft_s)
    if arguments.json is not None:
        rows = [
            {"preset": search.name, "policy": search.policy, "cards": search.cards, **asdict(size)}
            for search, size in zip(searches, found, strict=True)
        ]
        document = {"on_time": arguments.on_time, "slo_tpot_ms": slo_tpot_ms, "sizes": rows}
        write_whole(arguments.json, orjson.dumps(document, option=_JSON).decode())
    return 0


def _size_alone(search: FleetSizeJob, progress: Progress) -> FleetSize:
    """One search in this process, its progress by the numbers that it has tried and by the requests of each run."""
    requests = len(search.job.source.load().requests)
    tried, running = progress.add_task("numbers tried", total=None), progress.add_task("requests", total=requests)

    def on_tried(result: RunResult) -> None:
        said = f"numbers tried, {result.instances} instances: {result.share_on_time:.1%} on time"
        progress.update(tried, advance=1, description=f"{said}, P99 {result.ttft_s.p99:.1f} s")

    def on_progress(instances: int, arrived: int) -> None:
        progress.update(running, completed=arrived, description=f"requests to {instances} instances")

    return run_fleet_size(search, on_progress, on_tried)


def _show_first_tokens(result: RunResult, slo_s: float) -> None:
    if shown := first_tokens_over_time(result, slo_s):
        terminal().print(shown, highlight=False, soft_wrap=True)


def _search_alone(search: GoodputJob, progress: Progress) -> Goodput:
    """One search in this process, its progress by the rates that it has tried."""
    requests = len(search.job.source.load().requests)
    task, running = progress.add_task("rates tried", total=None), progress.add_task("requests", total=requests)

    def tried(rate_per_s: float, share: float) -> None:
        progress.update(task, advance=1, description=f"rates tried, {rate_per_s:.2f}/s: {share:.1%} on time")

    def on_progress(rate_per_s: float, arrived: int) -> None:
        progress.update(running, completed=arrived, description=f"requests at {rate_per_s:.2f}/s")

    return run_goodput(search, tried, on_progress)


def _write_plots(results: list[RunResult], folder: Path) -> None:
    from dualmap.simulation.figures.plots import run_plots

    for name, svg in run_plots(results).items():
        write_whole(folder / f"{name}.svg", svg)
