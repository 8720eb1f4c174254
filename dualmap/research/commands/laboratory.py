"""``dualmap laboratory``: a suite, its matrix changed by options, with a report of its own and a file of results."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from dualmap.research.commands.options import add_bench_arguments, bench_of
from dualmap.research.provenance import Provenance
from dualmap.research.suites.details import detail_tables, first_tables, render_markdown
from dualmap.research.suites.document import filled
from dualmap.research.suites.results import SuiteResult, run_suite
from dualmap.research.suites.results_file import RESULTS, read_outcome, render_json
from dualmap.research.suites.suite import SUITES, Suite, names_policies
from dualmap.research.suites.summary import SUMMARY
from dualmap.research.table import rich_table
from dualmap.research.targets import TARGETS, targets_of
from dualmap.research.workload import PRESET_SHORTHANDS, Traffic, recorded, traffic_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.commands.options import OptionError, exit_code, slo_tpot_s_of, write_whole
from dualmap.simulation.engine.presets import CHANGES, UnknownPresetError, find_preset
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.virtual_time.roles import roles_of

REPORT = "report.md"
_WHAT_RUNS = (
    "variant", "suite", "quick", "traces", "trace", "preset", "instances", "rates", "seeds", "requests_per_instance",
    "no_goodput", "targets", "saturation_of", "slo_tpot_ms",
)  # fmt: skip
"""Options of the variants and the matrix, none of which has a meaning where nothing is run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--variant", action="append", metavar="NAME=POLICY[,SETTING=VALUE…]",
        help="a competitor, the first is compared with the best other (none: the suite's, or all in both orders)",
    )  # fmt: skip
    matrix = parser.add_argument_group("matrix (what is left out is the suite's)")
    matrix.add_argument("--suite", choices=[*SUITES], help="which traces, fleets, rates and seeds (none: standard)")
    matrix.add_argument("--quick", action="store_true", help="--suite quick: a few minutes on two cores")
    matrix.add_argument("--traces", type=Path, metavar="DIR", help="folder with recordings to use for generators")
    matrix.add_argument("--trace", metavar="T[,T…]", help="workloads of the suite, other generators, or files")
    matrix.add_argument(
        "--preset", metavar="P[,P…]",
        help=f"engine models: {', '.join(PRESET_SHORTHANDS)}, also as 7b:prefill_first+kv_capacity_tokens=500000 "
        f"({', '.join(CHANGES)})",
    )  # fmt: skip
    matrix.add_argument("--instances", metavar="N[,N…]", help="sizes of the fleet")
    matrix.add_argument(
        "--rates",
        metavar="R[,R…]",
        help="requests per second; 1.5x is that multiple of saturation, 64c are 64 clients that are always busy",
    )
    matrix.add_argument(
        "--slo-tpot-ms", type=float, metavar="MS", help="SLO of the time per output token: what 'both SLOs' are"
    )
    matrix.add_argument("--seeds", type=int, metavar="N", help="traces of each kind; windows of a file")
    matrix.add_argument("--requests-per-instance", type=int, metavar="N", help="length of a trace")
    matrix.add_argument(
        "--targets", metavar="T[,T…]", help=f"what a goodput is the highest rate of: {', '.join(TARGETS)}"
    )
    matrix.add_argument(
        "--saturation-of",
        metavar="4P4D",
        help="roles of the fleet whose saturation rates are multiples of (none: mixed), or policies, joined by +",
    )
    matrix.add_argument("--no-goodput", action="store_true", help="leave the goodput of the variants out")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.md and results.json here")
    parser.add_argument(
        "--from", dest="former", type=Path, metavar="DIR",
        help="run nothing: print and write the report again of what an earlier --out wrote (there, without --out)",
    )  # fmt: skip
    parser.add_argument(
        "--document", type=Path, metavar="FILE",
        help="with --from: write the tables of this Markdown file again, see research/suites/document.py",
    )  # fmt: skip
    add_bench_arguments(parser)


def run(arguments: argparse.Namespace, scheduling: SchedulingSettings, engine: EngineSettings) -> int:
    """Variants change ``scheduling``; the presets replace ``engine``."""
    work = _run if arguments.former is None else _report_again
    return exit_code("laboratory", lambda: work(arguments, scheduling))


def suite_of(arguments: argparse.Namespace) -> Suite:
    """The suite with what the options change. Raises OptionError."""
    suite = SUITES["quick" if arguments.quick else arguments.suite or "standard"]
    folder = arguments.traces
    if folder is not None and not folder.is_dir():
        raise OptionError(f"--traces {folder} is not a folder")
    traffic: tuple[Traffic, ...] = tuple(recorded(each, folder) for each in suite.traffic)
    if arguments.trace is not None:
        traffic = tuple(traffic_of(name, folder) for name in _words(arguments.trace, "--trace"))
    slo_tpot_s = slo_tpot_s_of(arguments)
    if slo_tpot_s is not None:
        traffic = tuple(replace(each, slo_tpot_s=slo_tpot_s) for each in traffic)
    suite = replace(suite, traffic=traffic, goodput=suite.goodput and not arguments.no_goodput)
    if arguments.variant:
        suite = replace(suite, variants=tuple(arguments.variant))
    if arguments.preset is not None:
        suite = replace(suite, presets=tuple(_preset(name) for name in _words(arguments.preset, "--preset")))
    if arguments.instances is not None:
        sizes = tuple(_count(text, "--instances") for text in _words(arguments.instances, "--instances"))
        suite = replace(suite, sizes=sizes)
    if arguments.rates is not None:
        suite = replace(suite, rates=tuple(_words(arguments.rates, "--rates")))
    if arguments.targets is not None:
        names = tuple(_words(arguments.targets, "--targets"))
        suite = replace(suite, targets=tuple(target.name for target in targets_of(names)))
    if arguments.saturation_of is not None:
        if not names_policies(arguments.saturation_of):
            roles_of(arguments.saturation_of)
        suite = replace(suite, saturation_of=arguments.saturation_of)
    if arguments.seeds is not None:
        suite = replace(suite, seeds=_count(arguments.seeds, "--seeds"))
    if arguments.requests_per_instance is not None:
        requests = _count(arguments.requests_per_instance, "--requests-per-instance")
        suite = replace(suite, requests_per_instance=requests)
    return suite


def _run(arguments: argparse.Namespace, scheduling: SchedulingSettings) -> int:
    if arguments.document is not None:
        raise OptionError("--document needs --from: it shows the results of a former run")
    suite = suite_of(arguments)
    with bench_of(arguments) as bench:
        made = Provenance.here(sys.argv[1:])
        outcome = replace(run_suite(suite, scheduling, bench), made=made)
    _show(outcome)
    if arguments.out is not None:
        write_whole(arguments.out / RESULTS, render_json(outcome))
        write_whole(arguments.out / REPORT, render_markdown(outcome))
    return 0


def _report_again(arguments: argparse.Namespace, scheduling: SchedulingSettings) -> int:
    """Report from the file alone: neither the matrix nor ``scheduling`` matters."""
    idle = [name for name in _WHAT_RUNS if getattr(arguments, name)]
    if idle:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise OptionError(f"--from runs nothing, and what was run is in its folder: leave out {options}")
    outcome = read_outcome(arguments.former)
    if arguments.document is not None:
        return _fill(arguments.document, arguments.former.resolve().name, outcome)
    _show(outcome)
    write_whole((arguments.out or arguments.former) / REPORT, render_markdown(outcome))
    return 0


def _fill(document: Path, folder: str, outcome: SuiteResult) -> int:
    try:
        text = document.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{document}: cannot be read: {error.strerror or error}") from error
    write_whole(document, filled(text, folder, outcome))
    return 0


def _show(outcome: SuiteResult) -> None:
    console = terminal()
    summary = first_tables(outcome)
    if summary:
        console.print(f"{SUMMARY}\n", style="bold underline")
    for table in (*summary, *detail_tables(outcome)):
        console.print(table.title, style="bold", highlight=False, soft_wrap=True)
        console.print(rich_table(table, console.width))
        for note in filter(None, table.notes):
            console.print(note, highlight=False, soft_wrap=True)
        console.print()


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise OptionError(f"{option} names nothing")
    return list(dict.fromkeys(words))


def _preset(name: str) -> str:
    base, colon, changes = name.partition(":")
    full = PRESET_SHORTHANDS.get(base, base)
    try:
        return find_preset(full + colon + changes).name
    except UnknownPresetError as error:
        raise OptionError(str(error)) from error


def _count(value: str | int, option: str) -> int:
    try:
        count = int(value)
    except ValueError:
        count = 0
    if count < 1:
        raise OptionError(f"{option} must be a whole number of at least 1, found {value!r}")
    return count
