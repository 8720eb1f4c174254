"""A limit over two pools whose books lie on two servers, through routers and leaders that are processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
import redis
from redis.crc import key_slot

from dualmap.statestore.keys import PoolKeys
from tests.fleet.fleet_process import QUICK, Fleet, emulated, running_fleet
from tests.statestore.processes import form_cluster, node_port, running
from tests.support.store_servers import binary_of

QUOTA = 80
TENANTS = [
    {"name": "acme", "keys": [{"name": "ci", "key": "acme-secret"}], "limits": {"requests_per_day": QUOTA}},
    {"name": "other", "keys": [{"name": "ci", "key": "other-secret"}], "limits": {"requests_per_minute": 600}},
]
SLOTS_OF_A_NODE = 8192


def pool_names() -> list[str]:
    """The names of two pools, one on each node."""
    names = [f"pool-{number}" for number in range(20)]
    first = [key_slot(PoolKeys("dualmap", name).meta) < SLOTS_OF_A_NODE for name in names]
    return [names[first.index(True)], names[first.index(False)]]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[list[tuple[redis.Redis, int]]]:
    """A cluster of two servers."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in ("left", "right"):
            (folder / name).mkdir()
            options = ("--cluster-enabled", "yes", "--save", "")
            port = node_port()
            nodes.append((stack.enter_context(running(binary_of("valkey"), folder / name, *options, port=port)), port))
        asyncio.run(form_cluster(nodes))
        yield nodes


@contextlib.contextmanager
def instance(model: str, folder: Path) -> Iterator[str]:
    """An emulated instance of a model; its URL."""
    with emulated(folder / f"{model}.log", "--emulator.model", model) as ((url,), _):
        yield url


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two routers and a worker for two pools, each with an instance and on a node of its own."""
    tmp_path = tmp_path_factory.mktemp("divided")
    names = pool_names()
    with two_nodes(tmp_path) as nodes, instance("small", tmp_path) as small, instance("large", tmp_path) as large:
        pools = [
            {"name": name, "model": model, "instances": [{"id": model, "url": url}]}
            for name, model, url in zip(names, ("small", "large"), (small, large), strict=True)
        ]
        options = (
            *(*QUICK, "--store.url", f"redis+cluster://127.0.0.1:{nodes[0][1]}", "--replicas", "2", "--workers", "1"),
            *("--pools", json.dumps(pools), "--tenants", json.dumps(TENANTS)),
        )
        with running_fleet(tmp_path, options) as running_one:
            yield running_one


async def ask(fleet: Fleet, models: Sequence[str], key: str) -> list[httpx.Response]:
    """Requests at once, each over a connection of its own, so that both routers get some."""

    async def one(model: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": model, "prompt": "hello", "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"{fleet.endpoint}/v1/completions", json=body, headers=headers)

    return await asyncio.gather(*map(one, models))


def test_two_pools_on_two_servers_admit_a_limit_together_to_the_request(fleet: Fleet) -> None:
    admitted, refused, deadline_s = Counter[str](), 0, time.monotonic() + 60

    # when one pool wants all, and later both do, until every request of a time is refused in both
    models = ["small"] * 20
    while refused < 3 and time.monotonic() < deadline_s:
        answers = asyncio.run(ask(fleet, models, "acme-secret"))
        assert {answer.status_code for answer in answers} <= {200, 429}
        admitted.update(model for model, answer in zip(models, answers, strict=True) if answer.status_code == 200)
        waits = [answer for answer in answers if answer.headers.get("retry-after") == "1"]
        refused = refused + 1 if not waits and all(answer.status_code == 429 for answer in answers) else 0
        if admitted["small"] > QUOTA // 2:
            models = ["small", "large"] * 5
        if waits:
            time.sleep(0.5)  # a round of the leader, as the answer says

    # then the first one had more than its equal part, and both together the limit
    assert admitted["small"] > QUOTA // 2
    assert admitted.total() == QUOTA
    assert answers[0].json()["error"]["code"] == "insufficient_quota"


def test_an_answer_says_when_the_part_of_its_pool_is_unused_again(fleet: Fleet) -> None:
    (answer,) = asyncio.run(ask(fleet, ["large"], "other-secret"))

    assert answer.status_code == 200, answer.text
    fields = {name: answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
    assert fields == {"limit": "600", "remaining": "299", "reset": "200ms"}
