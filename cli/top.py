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
from typing import Generic, TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dualmap.cli.as_json import as_json
from dualmap.cli.errors import CommandError, of_store
from dualmap.cli.live_status import STATE_STYLES
from dualmap.cli.settings import Settings
from dualmap.router.telemetry.traffic import FleetTraffic, TrafficCounts
from dualmap.router.tenants.usage import TenantNow, tenants_now
from dualmap.scheduling.request.metering import Counts
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.tenants.budgets import Limit
from dualmap.simulation.terminal import terminal
from dualmap.statestore.answers import PoolOverview
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.errors import StoreConfigurationError, StoreError
from dualmap.statestore.pool import PoolStore

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
T = TypeVar("T")
Limits = Mapping[str, Sequence[Limit]]
"""Limits of tenants by their names."""


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
    except StoreConfigurationError as error:
        raise of_store(error) from error
    except StoreError as error:
        raise CommandError(f"{error}. Is store.url right?") from error
    return 0


async def _show(arguments: argparse.Namespace, settings: Settings) -> None:
    store = await open_store(settings.store, scheduling=settings.scheduling)
    shown = {pool.name: Shown() for pool in settings.pools}
    console = terminal()
    limits = {tenant.name: tenant.tenant().limits for tenant in settings.tenants}
    try:
        if arguments.json:
            overviews = await _overviews(store, shown)
            print(as_json({name: values(overview) for name, overview in overviews.items()}))
            return
        if arguments.once or not console.is_terminal:
            console.print(await _screen(store, shown, arguments.sort, None, limits))
            return
        with _pressed_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            sort = arguments.sort
            key = ""
            while key != "q":
                sort = next((name for name, (own, _) in SORTS.items() if own == key), sort)
                above = arguments.choice.splitlines()  # the screen hides what was printed before
                screen = await _screen(store, shown, sort, console.height - len(above), limits)
                live.update(Group(*above, screen), refresh=True)
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
        parts.append(pool_table(name, overviews[name], shown[name], sort, slos_s[name], rows))
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
        table.add_row(each.tenant, *rates, *counts, work, Text("  ").join(used))
    return Group(table, "")


async def _overviews(store: Store, pools: Iterable[str]) -> dict[str, PoolOverview]:
    overviews = {name: await store.pool(name).overview() for name in pools}
    if not any(overview.loads or overview.replicas for overview in overviews.values()):
        raise CommandError("the store knows no such pool (--pools, store.url and store.prefix say where to look)")
    return overviews


def values(overview: PoolOverview) -> dict[str, object]:
    """One pool's figures: what its living replicas counted since they started, and the load of each instance."""
    return {
        "counted": FleetTraffic().read(overview.replicas),
        "replicas": [each.replica_id for each in overview.replicas if each.is_alive(overview.now_ms)],
        "leader": overview.leader,
        "migrations": overview.migrations,
        "instances": overview.loads,
    }


async def _slo_s(pool: PoolStore) -> float:
    """The pool's SLO, which may have been changed in the running fleet."""
    return pool.settings.in_force((await pool.membership()).overrides).slo_ttft_s


def pool_table(
    name: str, overview: PoolOverview, shown: Shown, sort: str, slo_s: float, rows: int | None
) -> RenderableType:
    """One pool: its traffic in a line, then its instances in the order of ``sort``, ``rows`` of them at most."""
    total, lately, over_s = shown.read(overview, time.monotonic())
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("instance", "state", f"{'ahead':{_BAR // 2}}│SLO {slo_s:g}s"):
        table.add_column(heading, no_wrap=True)
    for heading in ("", "held", "running", "KV", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
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
        )
    more = [Text(f"… {len(loads) - rows} more", "dim")] if rows is not None and len(loads) > rows else []
    return Group(_headline(name, overview, total, lately, over_s), table, *more, "")


def _headline(
    name: str, overview: PoolOverview, total: TrafficCounts, lately: TrafficCounts, over_s: float
) -> RenderableType:
    counts = lately if lately.ended else total
    alive = sum(replica.is_alive(overview.now_ms) for replica in overview.replicas)
    ready = sum(load.state == "ready" for load in overview.loads.values())
    moved = sum(overview.migrations.values())
    fleet = (
        f"{ready}/{len(overview.loads)} ready",
        f"{alive} replica{'s'[: alive != 1]}",
        f"{overview.leader.owner} leads" if overview.leader else "no leader",
        f"{moved:,} migrations",
    )
    figures = (
        f"{lately.ended / over_s:.1f} requests/s" if over_s > 0 else f"{total.ended:,} requests",
        f"on time {_share(counts.on_time, counts.on_time + counts.late)}",
        f"hit rate {_share(counts.hit_tokens, counts.prompt_tokens)}",
        f"refused {_share(counts.refused, counts.ended)}",
    )
    went_on = (f"{total.continued:,} stream{'s'[: total.continued != 1]} went on elsewhere",) if total.continued else ()
    return Group(Text.assemble((name, "bold"), "  ", " · ".join(fleet)), Text(" · ".join((*figures, *went_on))), "")


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
