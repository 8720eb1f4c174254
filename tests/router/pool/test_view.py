"""The keeper of a replica's copy of the cluster."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.pool.view import ViewKeeper, next_view
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import Membership
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools


def keeper(pool: Any, clock: Any, **options: Any) -> ViewKeeper:
    return ViewKeeper(pool, clock=clock, **options)


async def test_the_copy_is_read_again_when_it_is_known_to_be_out_of_date(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    kept = keeper(pool, clock)
    running = asyncio.create_task(kept.run())
    await tools.settle()
    await pool.members.put_instance(tools.spec("a"))
    assert kept.view.ready == ()

    kept.renew()
    await tools.settle()

    assert kept.view.ready == ("a",)
    running.cancel()


async def test_an_idle_keeper_looks_by_itself(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    kept = keeper(pool, clock)
    running = asyncio.create_task(kept.run())
    await tools.settle()
    await pool.members.put_instance(tools.spec("a"))

    await clock.advance(1.1)

    assert kept.view.ready == ("a",)
    running.cancel()


async def test_the_view_stays_while_the_store_is_away(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    await store.pool("default").members.put_instance(tools.spec("a"))
    kept = keeper(tampered.pool("default"), clock)
    running = asyncio.create_task(kept.run())
    await tools.settle()

    async def away() -> None:
        raise StoreUnavailableError("away")

    tampered.before["membership"] = away
    await store.pool("default").members.put_instance(tools.spec("b"))
    await clock.advance(5.0)
    assert kept.view.ready == ("a",)
    with pytest.raises(StoreUnavailableError):
        await kept.refresh()

    del tampered.before["membership"]
    await clock.advance(3.0)
    assert kept.view.ready == ("a", "b")
    running.cancel()


async def test_every_refreshed_view_is_shown(store: Any) -> None:
    shown: list[ClusterView] = []
    kept = keeper(store.pool("default"), None, seen=shown.append)
    await store.pool("default").members.put_instance(tools.spec("a"))
    await kept.refresh()

    await store.pool("default").members.set_instance_state("a", InstanceState.DOWN)
    await kept.refresh()

    assert [view.instances["a"].state for view in shown] == [InstanceState.READY, InstanceState.DOWN]
    assert shown[-1] is kept.view


async def test_aliases_that_pods_name_are_names_of_the_pool_behind_those_of_operators(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    kept, told = keeper(pool, clock), []
    kept.on_names = lambda given, listed: told.append(dict(given.added))
    origin = {"uid": "u", "aliases": "gpt-4o sql"}
    await pool.members.put_instance(replace(tools.spec("a"), origin=origin))
    await pool.members.add_name("sql", "lora")

    await kept.refresh()

    assert told == [{"gpt-4o": "", "sql": "lora"}]


async def test_refreshes_at_the_same_time_share_one_call(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    kept = keeper(tampered.pool("default"), clock)

    await asyncio.gather(*(kept.refresh() for _ in range(20)))

    assert tampered.calls == ["membership"]


async def test_who_asks_while_the_store_is_read_shares_a_read_that_begins_later(store: Any, clock: Any) -> None:
    tampered, reading, go_on = tools.Tampered(store), asyncio.Event(), asyncio.Event()
    kept = keeper(tampered.pool("default"), clock)

    async def read_slowly() -> None:
        reading.set()
        await go_on.wait()

    tampered.after["membership"] = read_slowly
    first = asyncio.create_task(kept.refresh())
    await reading.wait()
    await store.pool("default").members.put_instance(tools.spec("a"))
    later = [asyncio.create_task(kept.refresh()) for _ in range(20)]
    await tools.settle()
    assert tampered.calls == ["membership"], "one read at a time"
    go_on.set()

    assert (await first).ready == ()
    assert [view.ready for view in await asyncio.gather(*later)] == [("a",)] * 20
    assert tampered.calls == ["membership", "membership"]


async def test_a_read_that_fails_fails_nobody_who_asked_later(store: Any, clock: Any) -> None:
    tampered, reading, go_on = tools.Tampered(store), asyncio.Event(), asyncio.Event()
    kept = keeper(tampered.pool("default"), clock)

    async def fail_slowly() -> None:
        reading.set()
        await go_on.wait()
        tampered.before.clear()
        raise StoreUnavailableError("away")

    tampered.before["membership"] = fail_slowly
    first = asyncio.create_task(kept.refresh())
    await reading.wait()
    leaves, stays = asyncio.create_task(kept.refresh()), asyncio.create_task(kept.refresh())
    await tools.settle()
    leaves.cancel()
    go_on.set()

    with pytest.raises(StoreUnavailableError):
        await first
    assert (await asyncio.wait_for(stays, 60)).epoch == 0


async def test_who_gives_up_waiting_does_not_stop_the_refresh_of_the_others(store: Any, clock: Any) -> None:
    tampered = tools.Tampered(store)
    kept = keeper(tampered.pool("default"), clock)
    first, second = asyncio.create_task(kept.refresh()), asyncio.create_task(kept.refresh())
    await asyncio.sleep(0)

    first.cancel()

    assert (await asyncio.wait_for(second, 60)).epoch == 0


def test_rings_are_kept_when_members_stay() -> None:
    specs = {name: tools.spec(name) for name in "ab"}
    first = next_view(keeper(None, None).view, Membership(1, 0, specs, HotnessTree(), 4.0))

    second = next_view(first, Membership(2, 1, specs, HotnessTree({9: 1}), 4.0))

    assert second.rings is first.rings
    assert (second.epoch, second.tree_version, second.tree.hot) == (2, 1, {9: 1})


async def test_the_view_stays_the_same_until_the_store_has_something_else(store: Any, clock: Any) -> None:
    pool = store.pool("default")
    await pool.members.put_instance(tools.spec("a"))
    kept = keeper(pool, clock)
    first, again = await kept.refresh(), await kept.refresh()

    await pool.members.put_instance(tools.spec("b"))
    second = await kept.refresh()
    await pool.adapters.restore({"x": RegisteredAdapter("/w")})
    third = await kept.refresh()

    assert again is first
    assert (first.ready, second.ready, third.ready) == (("a",), ("a", "b"), ("a", "b"))
    assert (second.loaded_anywhere, third.loaded_anywhere) == (frozenset(), frozenset({"x"}))
