"""``dualmap what-if``: a recorded hour on a twin of the fleet, as it is and as it would be."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dualmap.simulation.commands.options import (
    ConfiguredFleet,
    FleetOptions,
    OptionError,
    add_fleet_arguments,
    add_output_arguments,
    exit_code,
    fleet_options,
    write_whole,
)
from dualmap.simulation.commands.progress import over_runs, progress_bars
from dualmap.simulation.figures.fitting_table import fitting_table
from dualmap.simulation.figures.results import RequestOutcome
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.virtual_time.runs import run_all
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.what_if.comparison import ALL, Difference, Unit, Verdict, compare, figures
from dualmap.simulation.what_if.measured import measured_outcomes, share_measured
from dualmap.simulation.what_if.twin import Forecast, TwinJob, TwinRun, forecast, is_off
from dualmap.simulation.workload.recording import is_recording, merge_recordings
from dualmap.simulation.workload.traces import Trace, read_trace

WARM_UP_SHARE = 0.1
LONGEST_WARM_UP_S = 600.0
CANNOT_KNOW = (
    "requests that were refused or failed, as they are not recorded; clients that would send more, less or again",
    "whether answers would be longer or others: each has the length that was recorded",
    "the caches at the beginning of the recording: the twin's are empty, so its first part is not counted",
    "the network and the routers' own time, engines that die, and what an engine does beside its model of steps",
)
CLOSED_LOOP = "turns of runs come a think time after the answer before them, as they did; other requests at their times"


@dataclass(frozen=True, slots=True)
class Change:
    """The fleet as it would be."""

    configured: ConfiguredFleet
    fleet: Mapping[str, object]
    """Options of the command that it changes, by name."""
    words: Sequence[str]
    """What is changed, for people."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recording", nargs="+", type=Path, required=True, metavar="FILE",
        help="files that replicas recorded, folders of them, or the trace that dualmap record made of them",
    )  # fmt: skip
    parser.add_argument(
        "--change", type=Path, required=True, metavar="FILE",
        help="YAML of what would be different: sections of the configuration, and 'fleet:' with options of this command"
        " (instances, preset, roles, …)",
    )  # fmt: skip
    parser.add_argument(
        "--skip-s", type=float, metavar="S",
        help=f"leave the first S seconds out, which warm the caches (none: a tenth, at most {LONGEST_WARM_UP_S:g} s)",
    )  # fmt: skip
    add_fleet_arguments(parser)
    parser.set_defaults(concurrency=None, open_loop=False, seconds=None)
    add_output_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots (SVG) here; needs matplotlib")


def run(arguments: argparse.Namespace, configured: ConfiguredFleet, change: Change) -> int:
    return exit_code("what-if", lambda: _run(arguments, configured, change))


def _run(arguments: argparse.Namespace, configured: ConfiguredFleet, change: Change) -> int:
    if arguments.plots is not None:
        from dualmap.simulation.figures.plots import require_matplotlib

        require_matplotlib()
    trace = _trace(arguments.recording)
    span_s = trace.requests[-1].arrival_s - trace.requests[0].arrival_s
    if arguments.skip_s is None:
        arguments.skip_s = min(LONGEST_WARM_UP_S, WARM_UP_SHARE * span_s)
    now = _scenario(arguments, configured)
    then = _scenario(argparse.Namespace(**{**vars(arguments), **change.fleet}), change.configured)
    wanted = figures(now.slo_tpot_s)
    made = forecast(trace, now, then, wanted, lambda jobs: _run_jobs(arguments, jobs))
    as_is, changed = made.as_is, made.changed
    differences = compare(as_is.outcomes, changed.outcomes, wanted)
    console = terminal()
    _say_recording(console, trace, span_s, arguments.skip_s)
    _say_check(console, made.checked, made.pace)
    _say_change(console, change, differences, (as_is, changed))
    if arguments.json is not None:
        write_whole(arguments.json, _as_json(trace, change, made, differences))
    if arguments.plots is not None:
        measured = [one for one in measured_outcomes(trace, now.scheduling) if one.arrival_s >= arguments.skip_s]
        _write_plots(arguments.plots, measured, (as_is, changed))
    return 0


def _run_jobs(arguments: argparse.Namespace, jobs: Sequence[TwinJob]) -> list[TwinRun]:
    with progress_bars(arguments.quiet) as progress:
        return run_all(jobs, arguments.workers, over_runs(progress, len(jobs), len(jobs[0].trace.requests)))


def _trace(given: Sequence[Path]) -> Trace:
    paths = [path for one in given for path in (sorted(one.glob("*.jsonl")) if one.is_dir() else [one])]
    if not paths:
        raise OptionError(f"{given[0]}: no *.jsonl in this folder")
    if len(paths) == 1 and not is_recording(paths[0]):
        return read_trace(paths[0])
    return merge_recordings(paths)


def _scenario(arguments: argparse.Namespace, configured: ConfiguredFleet) -> Scenario:
    options: FleetOptions = fleet_options(arguments, configured)
    if len(options.policies) > 1:
        raise OptionError("--policy: a fleet has one policy")
    return replace(options.scenario(options.policies[0]), tenants=configured.tenants)


# what is printed -----------------------------------------------------------------------------------------------------
def _say_recording(console: Console, trace: Trace, span_s: float, skip_s: float) -> None:
    seen = share_measured(trace.requests)
    console.print(
        f"{len(trace.requests):,} requests in {span_s / 60:.1f} min, {trace.rate_per_s:.2f}/s; the first token of "
        f"{seen:.0%} was seen; the first {skip_s:.0f} s warm the caches and are not counted",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _say_check(console: Console, checked: Sequence[Difference], pace: float) -> None:
    if not checked:
        why = "the recording has no times of first tokens. Record with this release, and streams among the requests."
        found = Text.assemble(("\nThe forecast cannot be checked", "bold"), f": {why}")
        console.print(found, soft_wrap=True)
        return
    rows = [(one.figure.name, _value(one, one.now), _value(one, one.then), _error(one)) for one in checked]
    console.print("\nThe fleet as it is: measured, and by its twin", style="bold")
    console.print(_table(("", "measured", "twin", "error"), rows, console.width))
    if pace != 1.0:
        console.print(
            f"The recorded engines took {pace:.2f} times as long as their model, by the time per output token: those of"
            " both runs do, too.",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    if off := [one.figure.name for one in checked if is_off(one)]:
        advice = (
            "read the differences below as a direction at most, or measure an instance (dualmap calibrate URL --out"
            " engine.json) and pass --preset engine.json."
        )
        found = Text.assemble(("The twin is off", "bold"), f" in {', '.join(off)}: {advice}")
        console.print(found, soft_wrap=True)


def _say_change(
    console: Console, change: Change, differences: Sequence[Difference], runs: tuple[TwinRun, TwinRun]
) -> None:
    console.print(f"\nIf {'; '.join(change.words)}", style="bold", highlight=False, soft_wrap=True)
    shown = [
        one for one in differences if one.verdict is not Verdict.SAME or (one.group == ALL and (one.now or one.then))
    ]
    rows = [
        (one.group, one.figure.name, _value(one, one.now), _value(one, one.then), _change(one), str(one.verdict))
        for one in shown
    ]
    columns = ("requests", "figure", "as it is", "then", "difference", "")
    console.print(_table(columns, rows, console.width))
    for name, cost in _costs(runs):
        console.print(f"{name}: {cost[0]:.2f} as it is, {cost[1]:.2f} then", highlight=False)
    worse: dict[str, list[str]] = {}
    for one in differences:
        if one.verdict is Verdict.WORSE:
            worse.setdefault(one.group, []).append(one.figure.name)
    said = Text("Gets worse for", "bold") if worse else Text.assemble(("Nothing gets worse", "bold"), " beyond chance")
    console.print(said)
    for group, names in worse.items():
        console.print(f"  {group}: {', '.join(names)}", highlight=False, soft_wrap=True)
    console.print("Not known from here:")
    for words in (*CANNOT_KNOW, CLOSED_LOOP):
        console.print(f"  {words}", highlight=False, soft_wrap=True)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    return fitting_table(columns, rows, width, always=columns)


def _value(one: Difference, value: float) -> str:
    if one.figure.unit is Unit.SHARE:
        return f"{value:.1%}"
    if not isfinite(value):
        return "never"
    return f"{1000 * value:.0f} ms" if one.figure.name == "time a token" else f"{value:.2f} s"


def _error(one: Difference) -> str:
    if one.figure.unit is Unit.SHARE:
        return f"{100 * (one.then - one.now):+.1f} points"
    return f"{one.then / one.now - 1:+.0%}" if one.now else "-"


def _change(one: Difference) -> str:
    """The difference with its confidence interval, in points or percent."""
    known = isfinite(one.half_width)
    if one.figure.unit is Unit.SHARE:
        width = f" ± {100 * one.half_width:.1f}" if known else ""
        return f"{100 * (one.then - one.now):+.1f}{width} points"
    if not one.now or not isfinite(one.then - one.now):
        return "-"
    width = f" ± {100 * one.half_width / one.now:.0f}" if known else ""
    return f"{100 * (one.then / one.now - 1):+.0f}{width} %"


def _costs(runs: tuple[TwinRun, TwinRun]) -> Iterator[tuple[str, tuple[float, float]]]:
    now, then = runs
    yield "instance hours", (now.instance_hours, then.instance_hours)
    on_time = [sum(outcome.on_time for outcome in run.outcomes) for run in runs]
    if all(on_time):
        yield (
            "instance hours per 1,000 requests on time",
            (1000 * now.instance_hours / on_time[0], 1000 * then.instance_hours / on_time[1]),
        )


# files ---------------------------------------------------------------------------------------------------------------
def _as_json(trace: Trace, change: Change, made: Forecast, differences: Sequence[Difference]) -> str:
    document = {
        "requests": len(trace.requests),
        "change": list(change.words),
        "pace": made.pace,
        "measured_against_twin": [
            {"figure": one.figure.name, "measured": one.now, "twin": one.then, "off": is_off(one)}
            for one in made.checked
        ],
        "differences": [
            {
                "requests": one.group,
                "figure": one.figure.name,
                "unit": one.figure.unit,
                "as_it_is": one.now,
                "then": one.then,
                "half_width": one.half_width if isfinite(one.half_width) else None,
                "verdict": one.verdict,
            }
            for one in differences
        ],
        "instance_hours": {"as_it_is": made.as_is.instance_hours, "then": made.changed.instance_hours},
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()


def _write_plots(folder: Path, measured: Sequence[RequestOutcome], runs: tuple[TwinRun, TwinRun]) -> None:
    from dualmap.simulation.figures.plots import lines

    series = {"as it is, by the twin": runs[0].outcomes, "then": runs[1].outcomes}
    if measured:
        series = {"measured": measured, **series}
    write_whole(
        folder / "ttft.svg",
        lines({name: _distribution(each) for name, each in series.items()}, x="TTFT (s)", y="share of requests",
              title="time to first token", markers=False),
    )  # fmt: skip
    write_whole(
        folder / "ttft-over-time.svg",
        lines({name: _p90_over_time(each) for name, each in series.items()}, x="time (s)", y="P90 of the TTFT (s)",
              title="time to first token over the recording", markers=False),
    )  # fmt: skip


def _distribution(outcomes: Sequence[RequestOutcome]) -> tuple[list[float], list[float]]:
    """The distribution function at 200 places; requests without a first token are beyond its end."""
    times_s = sorted(outcome.ttft_s for outcome in outcomes)
    kept = sorted({round(place * (len(times_s) - 1) / 200) for place in range(201)})
    finite = [place for place in kept if isfinite(times_s[place])]
    return [times_s[place] for place in finite], [(place + 1) / len(times_s) for place in finite]


def _p90_over_time(outcomes: Sequence[RequestOutcome]) -> tuple[list[float], list[float]]:
    """P90 of each sixtieth of the time of arrivals that had requests."""
    width_s = max(outcomes[-1].arrival_s - outcomes[0].arrival_s, 1e-9) / 60
    parts: dict[int, list[float]] = {}
    for outcome in outcomes:
        if isfinite(outcome.ttft_s):
            parts.setdefault(int((outcome.arrival_s - outcomes[0].arrival_s) / width_s), []).append(outcome.ttft_s)
    shown = sorted(parts)
    return (
        [outcomes[0].arrival_s + part * width_s for part in shown],
        [sorted(parts[part])[int(0.9 * (len(parts[part]) - 1))] for part in shown],
    )
