"""Limits of tenants over eight replicas, of which one is killed each minute: what is admitted against the limit.

    python -m benchmarks.tenant_limits [--seconds 600] [--kill-every-s 60] [--replicas 8] [--clients 200]

Starts a fleet with emulated instances. Half of the clients send short requests for a tenant of 600 requests a minute,
the other half prompts of some 1,500 tokens for a tenant of 1,000,000 tokens a minute; refused ones come again at once,
so that both buckets are always nearly full. A replica is killed at intervals and comes back.

A bucket holds its capacity, and leaks at the limit's rate. So at the end, by the store's own clock, admitted was

    leaked since the first draw + what is still used

to the request and the token, where the bucket never ran empty. What was admitted is what was metered: the requests, or
tokens, of answered requests. A request that a killed replica held gives its draw back, and is metered as lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import redis

from dualmap.scheduling.tenants.budgets import entry_of
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.codec import budgets_from
from tests.fleet.fleet_process import Fleet, running_fleet

REQUESTS, TOKENS = 600, 1_000_000
TENANTS = [
    {"name": "requests", "keys": [{"name": "k", "key": "requests-key"}], "limits": {"requests_per_minute": REQUESTS}},
    {"name": "tokens", "keys": [{"name": "k", "key": "tokens-key"}], "limits": {"tokens_per_minute": TOKENS}},
]
BOOKS = PoolKeys("dualmap", "default").books
BUDGET_OF = {"requests": "requests/requests/minute", "tokens": "tokens/tokens/minute"}
PROMPT = "some words of a prompt " * 250
SETTLE_S = 20.0
"""Longer than a lease: what a killed replica held has come back by then."""


class Client:
    """One client that sends request after request, and comes again when it is refused."""

    def __init__(self, fleet: Fleet, tenant: str, number: int) -> None:
        self._fleet = fleet
        self.tenant = tenant
        self._random = random.Random(f"{tenant} {number}")
        self.answered = self.tokens = self.refused = self.failed = 0

    async def run(self, until_s: float) -> None:
        key = {"authorization": f"Bearer {self.tenant}-key"}
        while time.monotonic() < until_s:
            async with httpx.AsyncClient(timeout=60, headers=key) as client:  # another connection, another replica
                while time.monotonic() < until_s and await self._ask(client):
                    pass

    async def _ask(self, client: httpx.AsyncClient) -> bool:
        """Whether the connection goes on."""
        prompt = f"{self._random.random()} " + (PROMPT if self.tenant == "tokens" else "")
        body = {"model": self._fleet.model, "prompt": prompt, "max_tokens": 20 if self.tenant == "tokens" else 200}
        try:
            answer = await client.post(f"{self._fleet.endpoint}/v1/completions", json=body)
        except httpx.HTTPError:
            self.failed += 1
            await asyncio.sleep(0.2)
            return False
        if answer.status_code == 200:
            self.answered += 1
            self.tokens += answer.json()["usage"]["total_tokens"]
        elif answer.status_code == 429:
            self.refused += 1
            await asyncio.sleep(self._random.uniform(0.3, 1.2))
        else:
            self.failed += 1
        return True


async def first_draw_ms(fleet: Fleet, budget: str) -> int:
    """When the budget was first drawn from, to some milliseconds."""
    with redis.Redis.from_url(fleet.store_url) as store:
        while (found := used(store, budget)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return found[1]


async def run(fleet: Fleet, options: argparse.Namespace) -> tuple[list[Client], dict[str, int]]:
    until_s = time.monotonic() + options.seconds
    names = tuple(BUDGET_OF)
    clients = [Client(fleet, names[number % 2], number) for number in range(options.clients)]
    first = [asyncio.create_task(first_draw_ms(fleet, budget)) for budget in BUDGET_OF.values()]
    running = [asyncio.create_task(client.run(until_s)) for client in clients]
    kills = 0
    while time.monotonic() + options.kill_every_s < until_s:
        await asyncio.sleep(options.kill_every_s)
        fleet.kill(f"router-{kills % options.replicas + 1}")
        kills += 1
    await asyncio.gather(*running)
    await asyncio.sleep(SETTLE_S)
    return clients, dict(zip(BUDGET_OF, await asyncio.gather(*first), strict=True))


def used(store: Any, budget: str) -> tuple[float, int] | None:
    """The part of a budget that was used when it was written last, and the time of that, in ms; None: not yet."""
    book, kind = entry_of(budget)
    found = budgets_from(store.hget(BOOKS, book)).get(kind)
    return None if found is None else (found[0], int(found[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kill-every-s", type=float, default=60.0)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--time-scale", type=float, default=20.0, help="of the emulated instances")
    options = parser.parse_args()
    words = (
        *("--replicas", str(options.replicas), "--workers", "1", "--instances", "4"),
        *("--emulator.time_scale", str(options.time_scale), "--tenants", json.dumps(TENANTS)),
    )
    with tempfile.TemporaryDirectory() as folder, running_fleet(Path(folder), words) as fleet:
        clients, first_ms = asyncio.run(run(fleet, options))
        rows = fleet.get("/admin/usage?by=tenant")["rows"]
        with redis.Redis.from_url(fleet.store_url) as store:
            for tenant, limit in (("requests", REQUESTS), ("tokens", TOKENS)):
                left, at_ms = used(store, BUDGET_OF[tenant]) or (0.0, first_ms[tenant])
                report(tenant, limit, rows, clients, left, at_ms - first_ms[tenant])
        print(json.dumps({"left over": len(fleet.live_requests())}))


def report(
    tenant: str, limit: int, rows: list[dict[str, Any]], clients: list[Client], left: float, passed_ms: int
) -> None:
    """Print what was admitted, and what the limit allowed from the first draw to the last write of the budget."""
    metered = next(row for row in rows if row["tenant"] == tenant)
    mine = [client for client in clients if client.tenant == tenant]
    counts_tokens = tenant == "tokens"
    admitted = (
        metered["prompt_tokens"] + metered["output_tokens"] if counts_tokens else metered["requests"] - metered["lost"]
    )
    seconds = passed_ms / 1000
    allowed = limit * seconds / 60 + left
    print(
        json.dumps(
            {
                "tenant": tenant,
                "limit a minute": limit,
                "seconds": round(seconds, 3),
                "admitted, metered": admitted,
                "leaked and still used": round(allowed, 1),
                "difference": round(admitted - allowed, 1),
                "answered, by clients": sum(each.tokens if counts_tokens else each.answered for each in mine),
                "requests": metered["requests"],
                "lost with replicas": metered["lost"],
                "refused, by clients": sum(each.refused for each in mine),
                "failed, by clients": sum(each.failed for each in mine),
                "most that a bucket allows": round(limit * seconds / 60 + limit, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
