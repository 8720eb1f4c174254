"""``dualmap chaos``: faults on a local fleet under traffic whose every answer is known."""

from __future__ import annotations

import argparse
import asyncio
import difflib
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dualmap.research.chaos.checker import RightAnswers
from dualmap.research.chaos.local_fleet import ENGINES, REPLICAS, WORKERS, FleetPlan, LocalFleet
from dualmap.research.chaos.report import merged, results_table, said, scenarios_table
from dualmap.research.chaos.scenarios import SCENARIOS, SOAKED
from dualmap.research.chaos.soak import SoakPlan, holdings_table, soak
from dualmap.research.chaos.stage import Result, Stage
from dualmap.research.chaos.traffic import TrafficPlan
from dualmap.research.table import Table, rich_table
from dualmap.runtime.durations import duration_s
from dualmap.simulation.commands.options import OptionError, exit_code
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.figures.terminal import terminal

_TRAFFIC = TrafficPlan()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the scenarios, and run nothing")
    parser.add_argument("--scenario", action="append", metavar="S[,S…]", help="only these scenarios (none: all)")
    parser.add_argument(
        "--soak", type=_time_s, metavar="DURATION",
        help="instead of each scenario once: one after another at random for so long, as 90s, 20m or 1h",
    )  # fmt: skip
    parser.add_argument(
        "--every-s", type=_positive, default=20.0, metavar="S", help="with --soak: seconds between two faults"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of requests, victims and a soak's faults")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--rate", type=_positive, default=_TRAFFIC.rate_per_s, metavar="R", help="requests per second")
    traffic.add_argument(
        "--client-waits-s", type=_positive, default=_TRAFFIC.client_waits_s, metavar="S",
        help="a request without an end by then is stuck",
    )  # fmt: skip
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--engines", type=_several, default=ENGINES, metavar="N", help="emulated instances")
    fleet.add_argument("--replicas", type=_several, default=REPLICAS, metavar="N", help="routers")
    fleet.add_argument("--workers", type=_several, default=WORKERS, metavar="N", help="workers")
    fleet.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder for the logs of all processes (none: a temporary one)"
    )


def run(arguments: argparse.Namespace, config: Mapping[str, Any], emulator: EmulatorSettings, parent_pipe: str) -> int:
    """Exit code 1 where an answer was none that its scenario allows, a request was stuck, or something was left over.

    Args:
        config: the settings of the fleet as plain data; ``emulator`` are those of its instances.
        parent_pipe: see ``FleetPlan``.
    """
    if arguments.list:
        _show(scenarios_table(SCENARIOS.values()))
        return 0
    return exit_code("chaos", lambda: asyncio.run(_run(arguments, config, emulator, parent_pipe)))


async def _run(
    arguments: argparse.Namespace, config: Mapping[str, Any], emulator: EmulatorSettings, parent_pipe: str
) -> int:
    names = scenarios_of(arguments.scenario, SCENARIOS if arguments.soak is None else SOAKED)
    plan = FleetPlan(
        config, parent_pipe, emulator.served_model, arguments.engines, arguments.replicas, arguments.workers
    )
    traffic = TrafficPlan(rate_per_s=arguments.rate, client_waits_s=arguments.client_waits_s)
    rng, right = random.Random(arguments.seed), RightAnswers(emulator)

    @asynccontextmanager
    async def stage(*, tls: bool) -> AsyncIterator[Stage]:
        with tempfile.TemporaryDirectory(prefix="dualmap-chaos-") as temporary:
            directory = (arguments.keep or Path(temporary)) / ("tls" if tls else "plain")
            directory.mkdir(parents=True, exist_ok=True)
            async with LocalFleet(replace(plan, tls=tls), directory) as fleet:
                yield Stage(fleet, right, traffic, rng)

    if arguments.soak is None:
        return await _play(stage, names)
    if secured := [name for name in names if SCENARIOS[name].tls]:
        raise OptionError(f"a soak has no TLS, which {', '.join(secured)} needs")
    async with stage(tls=False) as one:
        return await _soak(one, names, SoakPlan(arguments.soak, arguments.every_s))


async def _play(stage: Callable[..., AbstractAsyncContextManager[Stage]], names: Sequence[str]) -> int:
    results: list[Result] = []
    for tls in (False, True):
        with_tls = [name for name in names if SCENARIOS[name].tls is tls]
        if with_tls:
            async with stage(tls=tls) as one:
                results += await _play_all(one, with_tls)
    _show(results_table(results))
    return 1 if len(results) < len(names) or any(result.problems for result in results) else 0


async def _play_all(stage: Stage, names: Sequence[str]) -> list[Result]:
    """The results of scenarios on one fleet; it ends early where that does not become whole."""
    results: list[Result] = []
    for name in names:
        _say(f"{name} …")
        results.append(result := await stage.play(SCENARIOS[name]))
        for line in said(result):
            _say(line)
        if result.recovery_s is None:
            _say(f"the fleet is not whole after {name}: what follows is not run")
            break
    return results


async def _soak(stage: Stage, names: Sequence[str], plan: SoakPlan) -> int:
    outcome = await soak(stage, [SCENARIOS[name] for name in names], plan, _say)
    for result in outcome.results:
        for line in said(result):
            _say(line)
    for problem in outcome.problems:
        _say(problem)
    _show(results_table(merged(outcome.results)))
    _show(holdings_table(outcome))
    _say("passed" if outcome.passed else "not passed")
    return 0 if outcome.passed else 1


def scenarios_of(given: Sequence[str] | None, by_default: Iterable[str]) -> list[str]:
    """The names of the scenarios to run. Raises OptionError: there is no such one."""
    if given is None:
        return list(by_default)
    names = [name.strip() for words in given for name in words.split(",") if name.strip()]
    for name in names:
        if name not in SCENARIOS:
            raise OptionError(f"there is no scenario {name!r}{did_you_mean(name)}")
    return names


def did_you_mean(word: str) -> str:
    close = difflib.get_close_matches(word, list(SCENARIOS), n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(SCENARIOS)}"


def _time_s(text: str) -> float:
    try:
        return _above_0(duration_s(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    return _above_0(float(text))


def _above_0(number: float) -> float:
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _several(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError("must be at least 2: the others stand in for the one that fails")
    return number


def _show(table: Table) -> None:
    console = terminal()
    console.print(rich_table(table, console.width))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
