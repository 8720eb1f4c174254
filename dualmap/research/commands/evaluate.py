"""``dualmap evaluate``: studies, those of the paper or others by name, as one HTML report and its JSON."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from rich.text import Text

from dualmap.research.commands.options import add_bench_arguments, bench_of
from dualmap.research.report import render_html, render_json
from dualmap.research.studies.plan import FULL, PRESET, QUICK, Plan, rules_of
from dualmap.research.studies.registry import PAPER, STUDIES, run_studies
from dualmap.research.suites.suite import SUITES
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.commands.options import OptionError, exit_code, policies_of, slo_tpot_s_of, write_whole
from dualmap.simulation.engine.presets import CHANGES, UnknownPresetError, find_preset
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.figures.plots import require_matplotlib
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.workload.generators import DEFAULT_SEED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer requests, rates and trials: minutes on two cores")
    parser.add_argument("--conversation", default="conversation", help="Conversation trace: file or generator")
    parser.add_argument("--toolagent", default="toolagent", help="Tool&Agent trace: file or generator")
    parser.add_argument("--policy", default="all", metavar="P[,P…]", help="policies in the comparisons")
    parser.add_argument(
        "--section",
        default="all",
        metavar="S[,S…]",
        help=f"only these studies: {', '.join(PAPER)}; or suites: {', '.join(SUITES)}",
    )
    parser.add_argument(
        "--slo-tpot-ms",
        type=float,
        metavar="MS",
        help="SLO of the time per output token: search the goodput with both SLOs, too",
    )
    changes = ", ".join(CHANGES)
    parser.add_argument("--engine", default="", metavar="C[+C…]", help=f"what differs in all engines: {changes}")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="seed of generated traces")
    parser.add_argument("--out", type=Path, default=Path("evaluation"), metavar="DIR", help="report.html, results.json")
    add_bench_arguments(parser)


def run(arguments: argparse.Namespace, scheduling: SchedulingSettings, engine: EngineSettings) -> int:
    """The paper's settings are fixed: neither ``scheduling`` nor ``engine`` changes them, ``--engine`` does."""
    return exit_code("evaluate", lambda: _run(arguments))


def plan_of(arguments: argparse.Namespace) -> Plan:
    chosen = policies_of(arguments.policy)
    try:
        find_preset(f"{PRESET}:{arguments.engine}")
    except UnknownPresetError as error:
        raise OptionError(f"--engine: {error}") from error
    return replace(
        QUICK if arguments.quick else FULL,
        conversation=arguments.conversation,
        toolagent=arguments.toolagent,
        policies=tuple(dict.fromkeys(("dualmap", *chosen))),
        seed=arguments.seed,
        engine_changes=arguments.engine,
        slo_tpot_s=slo_tpot_s_of(arguments),
    )


def sections_of(text: str) -> tuple[str, ...]:
    """The studies that ``text`` names; all are the paper's. Raises OptionError."""
    wanted = tuple(PAPER) if text == "all" else tuple(word.strip() for word in text.split(","))
    for name in wanted:
        if name not in STUDIES:
            raise OptionError(f"--section: there is no {name!r}; known are {', '.join(STUDIES)}")
    return wanted


def _run(arguments: argparse.Namespace) -> int:
    require_matplotlib()
    plan, wanted = plan_of(arguments), sections_of(arguments.section)
    plan.workloads()  # a broken trace is reported before anything long runs
    with bench_of(arguments) as bench:
        sections = run_studies(plan, bench, wanted)
    rules = rules_of(plan)
    write_whole(arguments.out / "results.json", render_json(asdict(plan), sections, rules))
    write_whole(arguments.out / "report.html", render_html(f"DualMap evaluation ({plan.name})", sections, rules))
    console = terminal()
    for section in sections:
        for finding in section.findings:
            console.print(Text.assemble((section.title, "bold"), f": {finding}"), soft_wrap=True)
    console.print(f"Report: {arguments.out / 'report.html'}, figures: {arguments.out / 'results.json'}", soft_wrap=True)
    return 0
