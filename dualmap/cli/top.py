"""``dualmap top``: a fleet anywhere, by its store alone, as a full-screen table that can be sorted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dualmap.cli.as_json import as_json
from dualmap.cli.errors import UsageError, of_store
from dualmap.cli.live_status import STATE_STYLES
from dualmap.cli.settings import Settings
from dualmap.router.telemetry.pressure import ADVICE, Pressure, overdue_in
from dualmap.router.telemetry.traffic import FleetTraffic, TrafficCounts
from dualmap.router.tenants.tenant_record import TenantRecord
from dualmap.router.tenants.usage import TenantNow, tenants_now
from dualmap.router.ui.chronicler import RECENT_SAMPLES, ended, recent_traffic
from dualmap.scheduling.estimates.kv_tiers import InstanceTiers
from dualmap.scheduling.request.metering import Counts
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.tenants.budgets import Limit
from dualmap.simulation.figures.terminal import terminal
from dualmap.statestore.call_values import PoolOverview, RunMemory
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.pool.chronicle import ChronicleRecord
from dualmap.statestore.tenants.tenant_book import Edition, TenantBook

SORTS: Mapping[str, tuple[str, Callable[[InstanceLoad], tuple[object, ...]]]] = {
    "name": ("n", lambda load: (load.instance_id,)),
    "ahead": ("a", lambda load: (-load.pending_tokens / load.prefill_tokens_per_s, load.instance_id)),
    "held": ("h", lambda load: (-load.queued_requests, load.instance_id)),
    "running": ("r", lambda load: (-load.running_requests, load.instance_id)),
    "kv": ("k", lambda load: (-load.kv_demand, load.instance_id)),
    "state": ("s", lambda load: (load.state, load.instance_id)),
}
"""Orders of the instances, with the key that chooses each."""
_WINDOW_S = 15.0
_OVERHEAD_LINES = 8
_BAR = 16
_TENANTS = 10
_NEAR = 0.9
_AT_LIMIT = 0.98
T = TypeVar("T")
Limits = Mapping[str, Sequence[Limit]]
"""Limits of tenants by their names."""
_FRESH_S = 30.0
"""Age up to which the record of the last minutes is taken for the present one."""
_SHOWN_PROBLEMS = 4
_USUAL_LOAD = 8192
"""Tokens of the load by which prices are shown."""


class Window(Generic[T]):
    """Readings of the last seconds, for figures per second."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, T]] = deque(maxlen=64)

    def take(self, reading: T, now_s: float) -> tuple[T, float]:
        """Keep a reading; returns the oldest that is kept, and the seconds since then."""
        self._readings.append((now_s, reading))
        while len(self._readings) > 1 and self._readings[0][0] < now_s - _WINDOW_S:
            self._readings.popleft()
        since_s, before = self._readings[0]
        return before, now_s - since_s


class MadeLimits:
    """The limits of the tenants that were made in the running fleet; those that cannot be read are left out."""

    def __init__(self) -> None:
        self._edition: Edition | None = None
        self._limits: dict[str, Sequence[Limit]] = {}

    async def read(self, book: TenantBook) -> Limits:
        """The limits as they are now. Only what has changed is read again."""
        news = await book.news(self._edition)
        self._edition = news.edition
        if news.whole:
            self._limits.clear()
        for name, text in news.texts.items():
            self._limits.pop(name, None)
            with contextlib.suppress(ValueError):
                if text is not None:
                    self._limits[name] = TenantRecord.parse(text).as_tenant(name).limits
        return self._limits


@dataclass(frozen=True, slots=True)
class LastMinutes:
    """The record of a pool's last minutes."""

    record: ChronicleRecord = field(default_factory=ChronicleRecord)
    recent: TrafficCounts = field(default_factory=TrafficCounts)
    """Counts of the last minute."""
    over_s: float = 0.0

    @classmethod
    async def read(cls, pool: PoolStore) -> LastMinutes:
        record, samples = await pool.chronicle.last_record(), await pool.chronicle.samples(RECENT_SAMPLES)
        return cls(record, *recent_traffic(record, samples)) if record.at_ms else cls()

    def is_fresh(self, now_ms: int) -> bool:
        return self.record.at_ms > 0 and now_ms - self.record.at_ms < 1000 * _FRESH_S


@dataclass
class Shown:
    """Counts that one pool's figures are computed from."""

    traffic: FleetTraffic = field(default_factory=FleetTraffic)
    totals: Window[TrafficCounts] = field(default_factory=Window)
    tenants: Window[Mapping[str, Counts]] = field(default_factory=Window)
    """Sums over the requests that ended today, by tenant."""

    def tenants_since(self, now: Sequence[TenantNow], now_s: float) -> tuple[Mapping[str, Counts], float]:
        """The counts of some seconds before, and the seconds since."""
        return self.tenants.take({each.tenant: each.today for each in now}, now_s)

    def read(self, overview: PoolOverview, now_s: float) -> tuple[TrafficCounts, TrafficCounts, float]:
        """The counts in all, the recent counts, and the seconds that these span."""
        total = self.traffic.read(overview.replicas)
        before, over_s = self.totals.take(total, now_s)
        return total, total.since(before), over_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sort", choices=SORTS, default="name", help="order of the instances; keys change it")
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="S", help="time between two readings")
    parser.add_argument("--once", action="store_true", help="print the table once; so it is off a terminal")
    parser.add_argument("--json", action="store_true", help="the values behind the table once, as JSON")


def looks_at_a_fleet(_: argparse.Namespace) -> bool:
    return True


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    try:
        asyncio.run(_show(arguments, settings))
    except StoreError as error:
        raise of_store(error) from error
    return 0


async def _show(arguments: argparse.Namespace, settings: Settings) -> None:
    store = await open_store(settings.store, scheduling=settings.scheduling)
    shown, made = {pool.name: Shown() for pool in settings.pools}, MadeLimits()
    console = terminal()
    configured = {tenant.name: tenant.tenant().limits for tenant in settings.tenants}

    async def screen(sort: str, height: int | None) -> RenderableType:
        limits = {**await made.read(store.tenants), **configured}
        return await _screen(store, shown, sort, height, limits)

    try:
        if arguments.json:
            overviews = await _overviews(store, shown)
            print(as_json({name: values(overview) for name, overview in overviews.items()}))
            return
        if arguments.once or not console.is_terminal:
            console.print(await screen(arguments.sort, None))
            return
        with _pressed_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            sort = arguments.sort
            key = ""
            while key != "q":
                sort = next((name for name, (own, _) in SORTS.items() if own == key), sort)
                above = arguments.choice.splitlines()  # the screen hides what was printed before
                live.update(Group(*above, await screen(sort, console.height - len(above))), refresh=True)
                try:
                    async with asyncio.timeout(arguments.interval_s):
                        key = await keys.get()
                except TimeoutError:
                    key = ""
    finally:
        await store.close()


async def _screen(
    store: Store, shown: Mapping[str, Shown], sort: str, height: int | None, limits: Limits | None = None
) -> RenderableType:
    """``limits`` are those of tenants, where there may be any."""
    overviews = await _overviews(store, shown)
    rows = None if height is None else max(3, height // len(overviews) - _OVERHEAD_LINES)
    slos_s = {name: await _slo_s(store.pool(name)) for name in shown}
    parts: list[RenderableType] = []
    for name in shown:
        minutes = await LastMinutes.read(store.pool(name))
        parts.append(pool_table(name, overviews[name], shown[name], sort, slos_s[name], rows, minutes))
        if limits is not None:
            tenants = await tenants_of(store.pool(name), limits)
            parts += [tenant_table(tenants, shown[name], time.monotonic())] if tenants else []
    hint = "  ".join(f"{key} {name}" for name, (key, _) in SORTS.items())
    return Group(*parts, *([Text(f"sort: {hint}   q quit", "dim")] if height is not None else []))


async def tenants_of(pool: PoolStore, limits: Limits) -> list[TenantNow]:
    """The tenants that did most today; empty where there is none, which costs one small read."""
    if not await pool.usage.of_day(await pool.usage.today()):
        return []
    requests = (await pool.snapshot()).requests
    return await tenants_now(pool.usage, requests, lambda tenant: limits.get(tenant, ()), most=_TENANTS)


def tenant_table(tenants: Sequence[TenantNow], shown: Shown, now_s: float) -> RenderableType:
    """The rates and counts of tenants now, and how far the limits are used that are nearest to their end."""
    before, over_s = shown.tenants_since(tenants, now_s)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tenant", no_wrap=True)
    headings = ("requests/s", "tokens/s", "refused/s", "held", "running", "requests today", "tokens today")
    for heading in (*headings, "work/share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("limits used", no_wrap=True)
    for each in tenants:
        today, former = each.today, before.get(each.tenant, each.today)
        tokens, formerly = (counts.prompt_tokens + counts.output_tokens for counts in (today, former))
        grown = (today.requests - former.requests, tokens - formerly, today.refused - former.refused)
        rates = [f"{max(0, count) / over_s:,.1f}" if over_s > 0 else "–" for count in grown]
        counts = [f"{count:,}" for count in (each.held, each.running, today.requests, tokens)]
        work = "–" if each.work is None else f"{each.work.part:.0%}/{each.work.share:.0%}"
        nearest = sorted(each.limits, key=lambda limit: -limit[2])[:2]
        used = [Text(f"{name} {of} {part:.0%}", "red" if part > _NEAR else "") for name, of, part in nearest]
        at_limit = any(part >= _AT_LIMIT for _, _, part in nearest) or (over_s > 0 and grown[2] > 0)
        table.add_row(Text(each.tenant, "bold red" if at_limit else ""), *rates, *counts, work, Text("  ").join(used))
    return Group(table, "")


async def _overviews(store: Store, pools: Iterable[str]) -> dict[str, PoolOverview]:
    overviews = {name: await store.pool(name).overview() for name in pools}
    if not any(overview.loads or overview.replicas for overview in overviews.values()):
        raise UsageError("the store knows no such pool; --pools, store.url and store.prefix say where to look")
    return overviews


def values(overview: PoolOverview) -> dict[str, object]:
    """One pool's figures: what its living replicas counted since they started, and the load of each instance."""
    return {
        "counted": FleetTraffic().read(overview.replicas),
        "replicas": [each.replica_id for each in overview.replicas if each.is_alive(overview.now_ms)],
        "leader": overview.leader,
        "migrations": overview.migrations,
        "instances": overview.loads,
        "tiers": {name: each.tiers for name, each in overview.tiers.items()},
        "doubts": overview.doubts,
        "runs": overview.runs,
    }


async def _slo_s(pool: PoolStore) -> float:
    """The pool's SLO, which may have been changed in the running fleet."""
    return pool.settings.in_force((await pool.membership()).overrides).slo_ttft_s


def pool_table(
    name: str,
    overview: PoolOverview,
    shown: Shown,
    sort: str,
    slo_s: float,
    rows: int | None,
    minutes: LastMinutes | None = None,
) -> RenderableType:
    """One pool: what is wrong, its traffic in a line, then its instances in the order of ``sort``, ``rows`` of them at
    most. ``minutes`` are its last ones; None: there is no record."""
    total, recent, over_s = shown.read(overview, time.monotonic())
    minutes = minutes or LastMinutes()
    if not recent.ended and minutes.is_fresh(overview.now_ms):
        recent, over_s = minutes.recent, minutes.over_s
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("instance", "state", f"{'ahead':{_BAR // 2}}│SLO {slo_s:g}s"):
        table.add_column(heading, no_wrap=True)
    for heading in ("", "held", "running", "KV", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    if overview.tiers:
        table.add_column("load of 8,192 tokens", no_wrap=True)
    loads = sorted(overview.loads.values(), key=SORTS[sort][1])
    for load in loads[:rows]:
        ahead_s = load.pending_tokens / load.prefill_tokens_per_s
        late = "red" if ahead_s > slo_s else ""
        table.add_row(
            load.instance_id,
            Text(load.state.value, STATE_STYLES.get(load.state.value, "")),
            _bar(load, slo_s),
            Text(f"{ahead_s:.2f} s", late),
            f"{load.queued_requests:,}",
            f"{load.running_requests:,}",
            Text(f"{load.kv_demand:.0%}", "red" if load.kv_demand > 1 else ""),
            f"{load.prefill_tokens_per_s:,.0f}",
            *([_tiers(overview.tiers.get(load.instance_id))] if overview.tiers else ()),
        )
    more = [Text(f"… {len(loads) - rows} more", "dim")] if rows is not None and len(loads) > rows else []
    more += [Text(f"{name}: its cache is estimated: {why}", "dim") for name, why in islice(overview.doubts.items(), 4)]
    wrong = _wrong(overview, minutes, recent, over_s, slo_s)
    return Group(*wrong, _headline(name, overview, total, recent, over_s), table, *more, "")


def _tiers(tiers: InstanceTiers | None) -> str:
    """The time of a usual load from each tier; a default price has a question mark."""
    each = () if tiers is None else tiers.tiers
    return "  ".join(f"{one.tier} {one.price.load_s(_USUAL_LOAD):.3f} s{'?' if one.reason else ''}" for one in each)


def _wrong(
    overview: PoolOverview, minutes: LastMinutes, recent: TrafficCounts, over_s: float, slo_s: float
) -> list[RenderableType]:
    """Present problems, the worst first, with what to do; then those that ended a short time ago."""
    lives = [replica for replica in overview.replicas if replica.is_alive(overview.now_ms)]
    if not lives or overview.leader is None:
        return [*_nobody(bool(lives), overview.leader is not None), Text("")]
    parts: list[Text] = []
    fresh = minutes.is_fresh(overview.now_ms)
    pressure = Pressure.of(overview, minutes.recent if fresh else recent, minutes.over_s if fresh else over_s, slo_s)
    if pressure.headline:
        parts += [
            Text(pressure.headline, "bold red"),
            Text(f"  {pressure.figures}"),
            Text(f"  {ADVICE}" if pressure.is_overload else "  dualmap explain lists late requests and why", "dim"),
        ]
    present = [each for each in minutes.record.problems if each.until_ms is None] if fresh else []
    others = [each for each in present if not each.key.endswith("/late")]
    for each in others[:_SHOWN_PROBLEMS]:
        style = {"critical": "bold red", "warning": "yellow"}.get(each.severity, "")
        parts += [
            Text.assemble((each.what, style), f": {each.why}" if each.why else ""),
            Text(f"  {each.advice}", "dim"),
        ]
    if len(others) > _SHOWN_PROBLEMS:
        parts.append(Text(f"… {len(others) - _SHOWN_PROBLEMS} more problems: see the live page (/ui)", "dim"))
    for each in islice(ended(minutes.record.problems, overview.now_ms), _SHOWN_PROBLEMS):
        ago_s = max(0, overview.now_ms - (each.until_ms or 0)) / 1000
        lasted_s = max(0, (each.until_ms or 0) - each.since_ms) / 1000
        parts.append(Text(f"over since {_time(ago_s)}, after {_time(lasted_s)}: {each.what}", "dim"))
    return [*parts, Text("")] if parts else []


def _nobody(routers: bool, leads: bool) -> list[Text]:
    """The words on a pool that no router serves, or no worker leads."""
    log = "look at the logs of those that ran"
    if not routers and not leads:
        what = "Nobody lives: no router has a lease, and no worker leads. No request is served."
        advice = f"Start them (dualmap router, dualmap worker; dualmap up for all on one machine), and {log}."
    elif not routers:
        what = "No router lives: no request is served."
        advice = f"Start routers (dualmap router), and {log}. Do they reach this store?"
    else:
        what = (
            "No worker leads: nothing is rebalanced, learned or checked, and an instance that comes back is not seen."
        )
        advice = f"Start a worker (dualmap worker), or {log}."
    left = [] if routers else [Text("  What is below is as they left it.", "dim")]
    return [Text(what, "bold red"), Text(f"  {advice}"), *left]


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _headline(
    name: str, overview: PoolOverview, total: TrafficCounts, recent: TrafficCounts, over_s: float
) -> RenderableType:
    counts = recent if recent.ended else total
    alive = sum(replica.is_alive(overview.now_ms) for replica in overview.replicas)
    ready = sum(load.state == "ready" for load in overview.loads.values())
    moved = sum(overview.migrations.values())
    fleet = (
        f"{ready}/{len(overview.loads)} ready",
        f"{alive} replica{'s'[: alive != 1]}",
        f"{overview.leader.owner} leads" if overview.leader else "no leader",
        f"{moved:,} migrations",
        *_runs(overview.runs),
    )
    overdue = overdue_in(replica for replica in overview.replicas if replica.is_alive(overview.now_ms))
    arriving = f"{recent.arrived / max(over_s, 1.0):.1f}/s arrive, " if recent.arrived else ""
    figures = (
        f"{arriving}{recent.ended / over_s:.1f} requests/s" if over_s > 0 else f"{total.ended:,} requests",
        f"on time {_share(counts.on_time, counts.on_time + counts.late)}",
        f"hit rate {_share(counts.hit_tokens, counts.prompt_tokens)}{_from_tiers(counts)}",
        f"refused {_share(counts.refused, counts.ended)}",
        *((f"{overdue:,} overdue",) if overdue else ()),
    )
    went_on = (f"{total.continued:,} stream{'s'[: total.continued != 1]} went on elsewhere",) if total.continued else ()
    return Group(Text.assemble((name, "bold"), "  ", " · ".join(fleet)), Text(" · ".join((*figures, *went_on))), "")


def _from_tiers(counts: TrafficCounts) -> str:
    """The parts of prompts that were to be loaded from tiers or pulled, and what was computed though a tier had it."""
    parts = [f"{tier} {_share(tokens, counts.prompt_tokens)}" for tier, tokens in counts.by_tier.items()]
    if counts.forgone_tokens:
        parts.append(f"{_share(counts.forgone_tokens, counts.prompt_tokens)} in tiers computed")
    return f" ({', '.join(parts)})" if parts else ""


def _runs(memory: RunMemory) -> tuple[str, ...]:
    """The memory that agents' runs have; empty where no run was admitted yet."""
    if not memory.capacity_tokens:
        return ()
    waiting = memory.waiting_turns
    used = f"runs have {_share(memory.used_tokens, memory.capacity_tokens)} of the KV memory"
    return (used, *((f"{waiting:,} turn{'s'[: waiting != 1]} parked",) if waiting else ()))


def _bar(load: InstanceLoad, slo_s: float) -> Text:
    """Work ahead on a scale that ends at twice the SLO: dispatched, held, and deferred prefill."""
    per_cell = 2 * slo_s * load.prefill_tokens_per_s / _BAR
    held = max(load.pending_tokens - load.dispatched_tokens - load.deferred_tokens, 0)
    late = load.pending_tokens > slo_s * load.prefill_tokens_per_s
    bar, tokens, cells = Text(), 0, 0
    for sign, part, style in (
        ("█", load.dispatched_tokens, "red" if late else "cyan"),
        ("▓", held, "red" if late else "blue"),
        ("░", load.deferred_tokens, "bright_black"),
    ):
        tokens += part
        filled = min(_BAR, round(tokens / per_cell))
        bar.append(sign * (filled - cells), style)
        cells = max(cells, filled)
    bar.append("·" * (_BAR - cells), "bright_black")
    return Text.assemble(bar[: _BAR // 2], ("│", "yellow"), bar[_BAR // 2 :])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


@contextlib.contextmanager
def _pressed_keys() -> Iterator[asyncio.Queue[str]]:
    """The keys as they are pressed; none where standard input is no terminal."""
    keys: asyncio.Queue[str] = asyncio.Queue()
    if not sys.stdin.isatty():
        yield keys
        return
    import termios
    import tty

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, lambda: keys.put_nowait(os.read(descriptor, 1).decode("latin-1")))
    try:
        yield keys
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
