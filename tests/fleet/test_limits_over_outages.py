"""A quota of a real fleet, whose store is killed under load and comes back with all that it was told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import redis

from dualmap.scheduling.tenants.budgets import KINDS
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.codec import budgets_from
from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.statestore.processes import running
from tests.support.ports import free_port
from tests.support.store_servers import binary_of

QUOTA, CLIENTS, OUTAGES = 90, 12, 3
TENANTS = [{"name": "acme", "keys": [{"name": "ci", "key": "acme-secret"}], "limits": {"requests_per_day": QUOTA}}]
OPTIONS = (
    *(*QUICK, "--replicas", "2", "--workers", "1", "--tenants", json.dumps(TENANTS)),
    *("--router.limits_without_store", "closed", "--time-scale", "1"),
    # Replicas outlive the outages: what one that is taken for dead had drawn is given back, though it still answers.
    *("--router.replica_lease_s", "20"),
)


@contextlib.contextmanager
def lasting_store(folder: Path, port: int) -> Iterator[redis.Redis]:
    """A server that forgets nothing; leaving the context kills it."""
    options = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")
    with running(binary_of("valkey"), folder, *options, port=port) as client:
        yield client


def used(store: redis.Redis) -> int:
    books: Any = store.hgetall(PoolKeys("dualmap", "default").books)
    return sum(
        round(amount)
        for text in books.values()
        for kind, (amount, _) in budgets_from(text).items()
        if KINDS[kind] == "requests/day"
    )


class Load:
    """Clients that send one request after the other until a limit refuses them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.answered = 0

    async def one(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                body = {"model": self._fleet.model, "prompt": f"hello {number}", "max_tokens": 30}
                headers = {"authorization": "Bearer acme-secret"}
                answer = await client.post(f"{self._fleet.endpoint}/v1/completions", json=body, headers=headers)
                self.answered += answer.status_code == 200
                if answer.status_code == 429:
                    return
                if answer.status_code != 200:
                    assert answer.json()["error"]["code"] in ("limits_unknown", "store_unavailable"), answer.text
                    await asyncio.sleep(0.1)

    async def until_answered(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.answered < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def exhausted_over_outages(fleet: Fleet, folder: Path, port: int) -> int:
    """The requests that were answered until the quota was spent, while the store was killed again and again."""
    load = Load(fleet)
    clients = asyncio.gather(*map(load.one, range(CLIENTS)))
    for outage in range(OUTAGES):
        with lasting_store(folder, port):
            await load.until_answered(load.answered + CLIENTS)
            assert not clients.done(), f"the quota was spent before outage {outage}"
        await load.until_answered(load.answered + 1)  # what is in flight is answered without the store
    with lasting_store(folder, port) as store:
        await clients
        until(lambda: used(store) == QUOTA, "the books have what was answered")
    return load.answered


def test_a_quota_holds_to_the_request_while_the_store_is_killed_under_load(tmp_path: Path) -> None:
    folder, port = tmp_path / "store", free_port()
    folder.mkdir()
    with contextlib.ExitStack() as first:
        first.enter_context(lasting_store(folder, port))
        with running_fleet(tmp_path, (*OPTIONS, "--store.url", f"redis://127.0.0.1:{port}")) as fleet:
            first.close()
            assert asyncio.run(exhausted_over_outages(fleet, folder, port)) == QUOTA
            with lasting_store(folder, port):
                fleet.stop()
