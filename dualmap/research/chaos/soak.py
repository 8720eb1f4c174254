"""Random faults at an interval under steady traffic, for as long as wanted; memory and descriptors must stay flat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dualmap.research.chaos.proc import open_files, resident_mib
from dualmap.research.chaos.report import said
from dualmap.research.chaos.stage import Result, Scenario, Stage, books
from dualmap.research.table import Cell, Table

WARM_UP_S = 20.0
"""Traffic before the first figures are taken: caches and pools have filled by then."""
_GROWTH_FILES = 24
_GROWTH_MIB = 24.0
_GROWTH_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Holdings:
    """The file descriptors and the memory that a process holds."""

    pid: int
    files: int
    mib: float

    @classmethod
    def of(cls, pid: int) -> Holdings:
        return cls(pid, open_files(pid), resident_mib(pid))


@dataclass(slots=True)
class SoakResult:
    """A soak: one result for each fault, whose books are those of the end."""

    results: list[Result] = field(default_factory=list)
    before: dict[str, Holdings] = field(default_factory=dict)
    """The holdings of each router and worker after the warm-up; of one that was started again, after its start."""
    after: dict[str, Holdings] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Problems found at the end: what was left over, what grew."""

    @property
    def passed(self) -> bool:
        return not self.problems and not any(result.problems for result in self.results)


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """The length of a soak, and the time from the begin of one fault to that of the next."""

    duration_s: float
    every_s: float = 20.0


async def soak(stage: Stage, scenarios: Sequence[Scenario], plan: SoakPlan, say: Callable[[str], None]) -> SoakResult:
    """Faults of these scenarios, one at a time, each after the fleet is whole again. It ends early where the fleet does
    not become whole."""
    outcome = SoakResult()
    traffic, stopping = stage.traffic(stage.rng.getrandbits(32)), asyncio.Event()
    sending = asyncio.create_task(traffic.run(stopping))
    end_s = time.monotonic() + plan.duration_s
    try:
        await stage.hold(WARM_UP_S)
        outcome.before = _holdings(stage)
        while time.monotonic() < end_s:
            began_s, result = time.monotonic(), Result(stage.rng.choice(scenarios))
            outcome.results.append(result)
            with traffic.counted() as result.tally:
                await stage.suffer(result)
                rest_s = plan.every_s - (time.monotonic() - began_s)
                await stage.hold(max(1.0, min(rest_s, end_s - time.monotonic())))
            stage.judge(result)
            say(f"{len(outcome.results)}: {result.scenario.name}, whole after {_seconds(result.recovery_s)}")
            for line in said(result):
                say(f"    {line}")
            if result.recovery_s is None:
                break
            _renew(outcome.before, _holdings(stage))
        with traffic.counted() as tally:
            stopping.set()
            await sending
        if outcome.results:
            outcome.results[-1].tally.add(tally)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        traffic.close()
    left = await stage.left_over()
    for result in outcome.results:
        result.books = books(left)
    if left:
        outcome.problems.append(f"left over: {books(left)}")
    if stage.drifted():
        outcome.problems.append("counts had drifted, and were repaired")
    await stage.hold(5.0)  # connections that are not needed any more are closed
    outcome.after = _holdings(stage)
    outcome.problems += grown(outcome.before, outcome.after)
    return outcome


def grown(before: Mapping[str, Holdings], after: Mapping[str, Holdings]) -> list[str]:
    """Complaints about processes that hold more than before, beyond what chance explains."""
    found = []
    for name, then in before.items():
        now = after.get(name)
        if now is None or now.pid != then.pid:
            continue
        if now.files > then.files + _GROWTH_FILES:
            found.append(f"{name} had {then.files} files open, and has {now.files}")
        if now.mib > then.mib * (1 + _GROWTH_SHARE) + _GROWTH_MIB:
            found.append(f"{name} had {then.mib:.0f} MiB, and has {now.mib:.0f}")
    return found


def holdings_table(outcome: SoakResult) -> Table:
    """Memory and descriptors of each process at the begin of its time and at the end."""
    rows: list[list[Cell]] = []
    for name, now in outcome.after.items():
        then = outcome.before.get(name, now)
        rows.append([name, then.files, now.files, f"{then.mib:.0f}", f"{now.mib:.0f}"])
    return Table("Processes", ("process", "files at first", "files at last", "MiB at first", "MiB at last"), rows)


def _holdings(stage: Stage) -> dict[str, Holdings]:
    up = stage.fleet.up
    return {name: Holdings.of(up.pid(name)) for name in (*stage.fleet.routers, *stage.fleet.workers)}


def _renew(before: dict[str, Holdings], now: Mapping[str, Holdings]) -> None:
    """A process that was started again is measured from now on."""
    for name, holdings in now.items():
        if before[name].pid != holdings.pid:
            before[name] = holdings


def _seconds(recovery_s: float | None) -> str:
    return "never" if recovery_s is None else f"{recovery_s:.1f} s"
