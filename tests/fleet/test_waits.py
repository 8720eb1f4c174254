"""Why a request was held, explained by a real fleet: what went past it, also once the planners are gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

CLASSES = [{"name": "interactive"}, {"name": "batch"}]
TENANTS = [
    {"name": "search", "priority_class": "interactive", "keys": [{"name": "web", "key": "search-secret"}]},
    {"name": "acme", "priority_class": "batch", "keys": [{"name": "ci", "key": "acme-secret"}]},
]
OPTIONS = (
    *(*QUICK, "--instances", "1", "--replicas", "2", "--workers", "1", "--time-scale", "1"),
    *("--tenants", json.dumps(TENANTS), "--scheduling.classes", json.dumps(CLASSES)),
)
OVERTAKING = 5


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("waits"), OPTIONS) as fleet:
        yield fleet


async def ask(fleet: Fleet, name: str, tenant: str, tokens: int, slo_ms: int) -> int:
    """The status of a request that shares no prompt with others."""
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": fleet.model, "prompt": f"{name} " * (4 * tokens // (len(name) + 1)), "max_tokens": 1}
        fields = {"authorization": f"Bearer {tenant}-secret", "x-request-id": name, "x-slo-ttft-ms": str(slo_ms)}
        return (await client.post(f"{fleet.endpoint}/v1/completions", json=body, headers=fields)).status_code


async def until_live(fleet: Fleet, state: str, count: int) -> None:
    def reached() -> bool:
        return sum(each["state"] == state for each in fleet.live_requests()) >= count

    await asyncio.to_thread(until, reached, f"{count} requests are {state}")


async def overload(fleet: Fleet) -> list[int]:
    """One request of the lower class comes behind a long one, and before several of the higher class."""
    long = asyncio.create_task(ask(fleet, "long", "search", 60_000, 60_000))
    await until_live(fleet, "dispatched", 1)
    slow = asyncio.create_task(ask(fleet, "slow", "acme", 300, 100))
    await until_live(fleet, "held", 1)
    later = [asyncio.create_task(ask(fleet, f"later-{n}", "search", 2000, 60_000)) for n in range(OVERTAKING)]
    return [*await asyncio.gather(long, slow, *later)]


def explained(fleet: Fleet) -> dict[str, Any]:
    return dict(fleet.get("/admin/explain/slow"))


def replica_of(fleet: Fleet, name: str) -> str:
    """The id of a router's replica, by its operation port."""
    words = Path(f"/proc/{fleet.pid(name)}/cmdline").read_text("utf-8").replace("\0", " ").split()
    port = words[words.index("--router.ops_port") + 1]
    return str(httpx.get(f"http://127.0.0.1:{port}/health").json()["replica_id"])


def test_explain_names_what_went_past_a_request_after_the_planners_are_gone(fleet: Fleet) -> None:
    assert asyncio.run(overload(fleet)) == [200] * (OVERTAKING + 2)

    found = explained(fleet)
    (wait,) = found["waits"]
    went = {"priority_class": "interactive", "tenant": "search", "requests": OVERTAKING, "came_later": OVERTAKING}
    assert (wait["end"], wait["ahead"], wait["overtaken_by"]) == ("granted", [went], OVERTAKING)
    assert wait["deferral"]["takes_s"] > 0
    text = fleet.dualmap("explain", "slow", "--url", fleet.endpoint)
    assert f"{OVERTAKING} of class interactive and tenant search" in text and "Deferred" in text

    # when every process that may have made the plans is killed but the one that keeps the rest of the explanation
    routers = {name for name in fleet.pids() if name.startswith("router-")}
    others = {name for name in routers if replica_of(fleet, name) != found["replica_id"]}
    assert (len(routers), len(others)) == (2, 1)
    for name in (*others, "worker-1"):
        fleet.kill(name)

    def explained_again() -> dict[str, Any] | None:
        again = explained(fleet)  # one reading: the next may meet a router that is being killed
        return again if again.get("rounds") else None

    assert until(explained_again, "the fleet explains the request again")["waits"] == found["waits"]
