"""Registered adapters, on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dualmap.scheduling.state.registered_adapters import AdapterState, RegisteredAdapter
from dualmap.statestore.pool import PoolStore, adapter_registry

SQL = RegisteredAdapter("/adapters/sql", rank=8, tenant="acme")


def as_is(wanted: RegisteredAdapter) -> adapter_registry.Changed:
    return lambda former, known: wanted


async def test_a_registered_adapter_is_a_part_of_the_membership_and_its_epoch_grows(pool: PoolStore) -> None:
    before = await pool.membership()

    made = await pool.adapters.change("sql", as_is(SQL))
    after = await pool.membership()

    assert made is not None
    assert replace(made, since_ms=0) == SQL
    assert after.adapters == {"sql": made}
    assert after.epoch > before.epoch


async def test_a_change_sees_what_is_there_and_may_leave_it(pool: PoolStore) -> None:
    await pool.adapters.change("chat", as_is(RegisteredAdapter("/adapters/chat")))
    made = await pool.adapters.change("sql", as_is(SQL))
    seen: list[tuple[RegisteredAdapter | None, Mapping[str, RegisteredAdapter]]] = []

    def leave(former: RegisteredAdapter | None, known: Mapping[str, RegisteredAdapter]) -> None:
        seen.append((former, known))

    before = await pool.membership()
    assert await pool.adapters.change("sql", leave) is None
    assert seen[0][0] == made
    assert {*seen[0][1]} == {"chat", "sql"}
    assert (await pool.membership()).epoch == before.epoch


async def test_a_change_that_lost_a_race_sees_the_others(pool: PoolStore) -> None:
    """Two that register one name at a time: one is later, and finds the other's."""

    async def register(path: str) -> None:
        def wanted(former: RegisteredAdapter | None, _: Mapping[str, RegisteredAdapter]) -> RegisteredAdapter:
            return RegisteredAdapter(path, generation=0 if former is None else former.generation + 1)

        await pool.adapters.change("sql", wanted)

    await asyncio.gather(*(register(f"/adapters/{number}") for number in range(8)))

    assert (await pool.membership()).adapters["sql"].generation == 7


async def test_a_registration_is_taken_back_unless_somebody_changed_it(pool: PoolStore) -> None:
    made = await pool.adapters.change("sql", as_is(SQL))
    assert made is not None
    assert await pool.adapters.take_back("sql", made, None)
    unloaded = (await pool.membership()).adapters["sql"]
    again = await pool.adapters.change("sql", as_is(replace(SQL, generation=1)))
    assert again is not None

    assert unloaded.state is AdapterState.UNLOADED
    assert not await pool.adapters.take_back("sql", made, None)
    assert (await pool.membership()).adapters["sql"] == again
    assert await pool.adapters.take_back("sql", again, unloaded)
    assert (await pool.membership()).adapters["sql"] == unloaded


async def test_lost_adapters_are_restored_and_what_is_there_stays(pool: PoolStore) -> None:
    made = await pool.adapters.change("sql", as_is(SQL))
    chat = RegisteredAdapter("/adapters/chat", since_ms=5)

    assert await pool.adapters.restore({"sql": replace(SQL, path="/old"), "chat": chat}) == 1
    assert (await pool.membership()).adapters == {"sql": made, "chat": chat}


async def test_the_oldest_unloaded_adapters_are_forgotten_where_there_are_too_many(
    pool: PoolStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_registry, "MOST_FORGOTTEN", 1)
    await pool.adapters.restore({"old": RegisteredAdapter("/a", since_ms=1, state=AdapterState.UNLOADED)})
    await pool.adapters.restore({"older": RegisteredAdapter("/b", since_ms=0, state=AdapterState.UNLOADED)})

    await pool.adapters.change("sql", as_is(SQL))

    assert {*(await pool.membership()).adapters} == {"old", "sql"}


async def test_a_record_that_cannot_be_read_is_none_and_is_mended(pool: PoolStore) -> None:
    await pool._calls.command("HSET", pool._keys.adapter_records, "bad", b"\xff")
    lease = await pool.leader_lease.acquire("one", 60_000)
    assert lease is not None

    assert (await pool.membership()).adapters == {}
    await pool.upkeep.mend(fence=lease.fence)

    assert not await pool._calls.command("HGETALL", pool._keys.adapter_records)


async def test_failures_are_kept_in_words_until_they_end(pool: PoolStore) -> None:
    await pool.adapters.note_failure("a", "sql writer", "it answered 404")
    await pool.adapters.note_failure("b", "sql writer", "x" * 1000)
    await pool.adapters.note_failure("b", "chat", None)
    found = await pool.adapters.failures()

    assert found["a", "sql writer"].text == "it answered 404"
    assert len(found["b", "sql writer"].text) == adapter_registry.LONGEST_FAILURE
    await pool.adapters.note_failure("a", "sql writer", None)
    assert {*await pool.adapters.failures()} == {("b", "sql writer")}
