"""``dualmap inspect``: the shared state for people, directly from the store, without a router."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import NamedTuple

from rich.console import RenderableType

from dualmap.cli import inspect_tables as tables
from dualmap.cli.as_json import as_json
from dualmap.cli.errors import CommandError, UsageError, of_store
from dualmap.cli.settings import Settings
from dualmap.runtime.spelling import did_you_mean
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.ring import DualRing
from dualmap.scheduling.state.view import is_scheduled
from dualmap.simulation.figures.terminal import terminal
from dualmap.statestore.call_values import PoolSnapshot
from dualmap.statestore.connect import Store, open_store
from dualmap.statestore.errors import StoreConfigurationError, StoreError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.calls import Calls
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.url import without_password

_NO_SERVER = ("memory", "embedded")
_NAMED = 10
_VIEW_HELP = {
    "overview": "instances with their roles, replicas, leader, migrations",
    "queues": "held requests of every instance, in the order of their queue",
    "ring": "share of the hash space that each instance owns on either ring",
    "hot": "hot prefixes with depth and traffic",
    "requests": "live requests; both legs of those that are split",
    "scaling": "the last decision on the number of instances, and the log of decisions",
    "discovery": "what discovery looks at, whether it can, and what it leaves out",
    "kv": "blocks that an instance is believed to hold, newest first",
}


class Shown(NamedTuple):
    """A view: a table for people, and the values behind it."""

    table: RenderableType
    values: object


def add_arguments(parser: argparse.ArgumentParser) -> None:
    views = parser.add_subparsers(dest="view", metavar="VIEW", required=True)
    for view, shows in _VIEW_HELP.items():
        view_parser = views.add_parser(view, help=shows, description=shows)
        view_parser.add_argument("--pool", help="pool name; by default the first configured one")
        view_parser.add_argument("--json", action="store_true", help="the values behind the table, as JSON")
        if view == "kv":
            view_parser.add_argument("instance")
        if view in ("requests", "hot", "kv", "scaling"):
            view_parser.add_argument("--limit", type=int, default=50, help="rows at most")


def looks_at_a_fleet(_: argparse.Namespace) -> bool:
    return True


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    pool = arguments.pool or settings.pools[0].name
    read = _from_keys if arguments.view in _RAW_VIEWS else _from_store
    shown = asyncio.run(read(arguments, settings, pool))
    if arguments.json:
        print(as_json(shown.values))
    else:
        terminal().print(shown.table)
    return 0


async def _from_store(arguments: argparse.Namespace, settings: Settings, pool: str) -> Shown:
    try:
        store = await open_store(settings.store, scheduling=settings.scheduling)
    except StoreError as error:
        raise of_store(error) from error
    try:
        return await _VIEWS[arguments.view](store, pool, arguments, settings)
    except StoreError as error:
        raise of_store(error) from error
    finally:
        await store.close()


async def _snapshot(store: Store, pool: str) -> PoolSnapshot:
    snapshot = await store.pool(pool).snapshot()
    if not snapshot.instances and not snapshot.replicas:
        raise UsageError(f"the store knows no pool {pool!r}; --pool, store.url and store.prefix say where to look")
    return snapshot


async def _overview(store: Store, pool: str, _: argparse.Namespace, __: Settings) -> Shown:
    snapshot, discovery = await _snapshot(store, pool), await store.pool(pool).publications.discovery()
    values = {each.name: getattr(snapshot, each.name) for each in fields(snapshot) if each.name != "requests"}
    return Shown(tables.overview(pool, snapshot, discovery), {**values, "discovery": discovery})


async def _queues(store: Store, pool: str, _: argparse.Namespace, __: Settings) -> Shown:
    snapshot = await _snapshot(store, pool)
    queues = await asyncio.gather(
        *(store.pool(pool).queues.queue(instance_id) for instance_id in sorted(snapshot.instances))
    )
    known = [queue for queue in queues if queue is not None]
    return Shown(tables.queues(known), known)


async def _ring(store: Store, pool: str, _: argparse.Namespace, settings: Settings) -> Shown:
    snapshot = await _snapshot(store, pool)
    ready = [spec.instance_id for spec in snapshot.instances.values() if is_scheduled(spec)]
    rings = DualRing.of(ready)
    shares = [tables.owned_shares(each) for each in (rings.first, rings.second)]
    values = {name: [each.get(name, 0.0) for each in shares] for name in rings.members}
    return Shown(tables.ring(rings), values)


async def _requests(store: Store, pool: str, arguments: argparse.Namespace, _: Settings) -> Shown:
    snapshot = await _snapshot(store, pool)
    return Shown(tables.requests(snapshot, arguments.limit), tables.oldest_first(snapshot)[: arguments.limit])


async def _scaling(store: Store, pool: str, arguments: argparse.Namespace, _: Settings) -> Shown:
    await _snapshot(store, pool)
    known = store.pool(pool)
    record, log = await known.publications.scaling(), await known.publications.scaling_log(arguments.limit)
    of_decode = await known.publications.scaling(Role.DECODE)
    return Shown(tables.scaling((record, of_decode), log), {"last": record, "last_of_decode": of_decode, "log": log})


async def _discovery(store: Store, pool: str, _: argparse.Namespace, __: Settings) -> Shown:
    status = await store.pool(pool).publications.discovery()
    return Shown(tables.discovery(status), status)


_VIEWS: dict[str, Callable[[Store, str, argparse.Namespace, Settings], Awaitable[Shown]]] = {
    "overview": _overview,
    "queues": _queues,
    "ring": _ring,
    "requests": _requests,
    "scaling": _scaling,
    "discovery": _discovery,
}


class RawPool:
    """Keys of a pool that no store method shows, read directly from their server."""

    def __init__(self, keys: PoolKeys, calls: Calls) -> None:
        self._keys = keys
        self._calls = calls

    async def hot_prefixes(self) -> list[tuple[str, int, int]]:
        """Hot prefixes in hex, with depth in blocks and requests in the window; most traffic first."""
        rows = []
        for prefix, value in pairs_from(await self._calls.command("HGETALL", self._keys.hotness_tree)).items():
            depth, _, count = value.decode().partition(" ")
            rows.append((prefix.decode(), int(depth), int(count or 0)))
        return sorted(rows, key=lambda row: (-row[2], row[1], row[0]))

    async def kv_blocks(self, instance_id: str, limit: int) -> tuple[int, list[tuple[str, float]]]:
        """How many blocks are listed, and the newest of them in hex with their stamps; docs/reference/redis-keys.md.

        Raises:
            UsageError: the pool has no such instance.
        """
        members = sorted(each.decode() for each in await self._calls.command("HKEYS", self._keys.instances))
        if instance_id not in members:
            known = [*members[:_NAMED], "…"] if len(members) > _NAMED else members or ["none"]
            meant = did_you_mean(instance_id, known) or f", but {', '.join(known)}"
            raise UsageError(f"the pool has no instance {instance_id!r}{meant}")
        key = self._keys.kv(instance_id)
        total = int(await self._calls.command("ZCARD", key))
        newest = pairs_from(await self._calls.command("ZREVRANGE", key, 0, limit - 1, "WITHSCORES"))
        return total, [(block.hex(), float(stamp)) for block, stamp in newest.items()]


async def _from_keys(arguments: argparse.Namespace, settings: Settings, pool: str) -> Shown:
    url = settings.store.url
    if url.partition("://")[0] in _NO_SERVER:
        raise UsageError(f"this view reads Redis itself and needs a redis:// URL, not {without_password(url)!r}")
    try:
        calls = RedisStore(settings.store, scheduling=settings.scheduling).calls(pool)
        try:
            return await _RAW_VIEWS[arguments.view](RawPool(PoolKeys(settings.store.prefix, pool), calls), arguments)
        finally:
            await calls.close()
    except StoreConfigurationError as error:
        raise of_store(error) from error
    except StoreError as error:
        raise CommandError(f"the store does not answer: {error}") from error


async def _hot(pool: RawPool, arguments: argparse.Namespace) -> Shown:
    found = (await pool.hot_prefixes())[: arguments.limit]
    return Shown(tables.hot(found), [{"prefix": each, "blocks": depth, "requests": n} for each, depth, n in found])


async def _kv(pool: RawPool, arguments: argparse.Namespace) -> Shown:
    total, blocks = await pool.kv_blocks(arguments.instance, arguments.limit)
    values = [{"block": block, "stamp": stamp, "resident": tables.is_resident(stamp)} for block, stamp in blocks]
    return Shown(tables.kv(total, blocks), {"listed": total, "newest": values})


_RAW_VIEWS: dict[str, Callable[[RawPool, argparse.Namespace], Awaitable[Shown]]] = {"hot": _hot, "kv": _kv}
