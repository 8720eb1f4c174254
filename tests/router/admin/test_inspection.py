"""Looking inside the fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.runs.turn import Turn, hashed_name
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from dualmap.statestore.pool.runs import TurnStatus
from tests.router import tools


async def test_queues_list_held_requests_in_the_order_of_their_turn(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    long = "word " * 1000
    await runtime.intake.place(tools.request(long))
    waiting = []
    for name in ("first", "second"):
        waiting.append(asyncio.create_task(runtime.intake.place(tools.request(long, request_id=name))))
        await tools.settle()

    queue = (await client_of(runtime).get("/admin/queues")).json()[0]

    assert (queue["instance_id"], queue["queued_requests"], queue["running_requests"]) == ("a", 2, 1)
    assert [request["request_id"] for request in queue["held"]] == ["first", "second"]
    for task in waiting:
        task.cancel()


async def test_the_ring_shows_shares_that_add_up_and_the_pair_of_a_key(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abc"))
    client = client_of(runtime)

    ring = (await client.get("/admin/ring")).json()
    pair = (await client.get("/admin/ring?key=00000000000000ff")).json()

    for shares in ring["shares"].values():
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4)
    assert pair["pair"] == list(runtime.pools.pools["default"].view.view.rings.pair(0xFF))
    for key in ("xyz", "-1", "1" * 17):
        assert (await client.get(f"/admin/ring?key={key}")).status_code == 400


async def test_a_prompt_looked_up_has_the_pair_that_a_request_gets(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=tuple(tools.spec(name) for name in "abcdefgh"))
    client = client_of(runtime)
    request = await runtime.intake.place(tools.request("the very same prompt"))

    by_query = (await client.get("/admin/ring", params={"prompt": "the very same prompt"})).json()
    by_body = (
        await client.post(
            "/admin/ring?path=/v1/completions", json={"model": "default", "prompt": "the very same prompt"}
        )
    ).json()

    assert by_query["hash_key"] == by_body["hash_key"] == f"{request.explain().prompt.key.hash:016x}"
    assert by_query["pair"] == list(request.explain().rounds[0].candidates)
    assert (await client.post("/admin/ring", json={"prompt": 1})).status_code == 400
    assert (await client.post("/admin/ring?path=/v1/embeddings", json={})).status_code == 400


async def test_hot_prefixes_are_listed_by_depth(start_runtime: Any, client_of: Any, store: Any, clock: Any) -> None:
    runtime = await start_runtime()
    pool = store.pool("default")
    lease = await pool.leader_lease.acquire("leader", 60_000)
    await pool.publications.publish_tree(HotnessTree({255: 2, 7: 1}), {255: 40, 7: 50}, fence=lease.fence)
    await clock.advance(1.1)

    hot = (await client_of(runtime).get("/admin/hot-prefixes")).json()[0]

    assert hot["count"] == 2
    assert hot["prefixes"] == [
        {"prefix": "0000000000000007", "blocks": 1},
        {"prefix": "00000000000000ff", "blocks": 2},
    ]


async def test_live_requests_of_all_replicas_can_be_filtered(start_runtime: Any, client_of: Any) -> None:
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime()
    await one.intake.place(tools.request(request_id="mine"))
    theirs = await other.intake.place(tools.request(request_id="theirs"))
    theirs.first_token()
    await tools.settle()
    client = client_of(one)

    async def listed(query: str) -> list[str]:
        return [request["request_id"] for request in (await client.get(f"/admin/requests{query}")).json()]

    assert await listed("") == ["mine", "theirs"]
    assert await listed("?replica=replica-2") == ["theirs"]
    assert await listed("?state=prefilled") == ["theirs"]
    assert await listed("?instance=b") == []
    assert await listed("?limit=1") == ["mine"]


@pytest.mark.parametrize("path", ["/admin/instances", "/admin/requests", "/admin/queues"])
async def test_a_replica_on_its_own_does_not_pass_its_view_off_as_the_fleets(
    start_runtime: Any, client_of: Any, path: str
) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"),),
        through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0],
    )
    client = client_of(runtime)
    assert (await client.get(path)).status_code == 200

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("away")

    tampered[0].before |= dict.fromkeys(("snapshot", "membership", "loads"), away)
    await runtime.pools.pools["default"].view.refresh()
    answer = await client.get(path)

    assert runtime.replicas["default"].store_state == "local"
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")


async def test_a_run_is_found_by_the_beginning_of_its_id_and_by_the_name_that_its_client_sends(
    start_runtime: Any, client_of: Any, store: MemoryStore
) -> None:
    client = client_of(await start_runtime())
    names = {tenant: hashed_name(tenant, "my session", "sub-agent") for tenant in ("acme", "other")}
    for number, (tenant, name) in enumerate(names.items()):
        turn = Turn(f"t{number}", "one", name, Chain((number,), 16, 20 + number), 4.0, tenant=tenant)
        assert await store.pool("default").runs.admit([turn], 1000) == [TurnStatus.GOES]

    async def found(run: str, **wanted: str) -> list[dict[str, Any]]:
        answer = await client.get("/admin/runs", params={"run": run, **wanted})
        return list(answer.json()["runs"])

    (one,) = await found(names["other"].run[:12])
    assert (one["tenant"], one["context_tokens"], one["state"]) == ("other", 21, "active")
    assert [(each["agent"], each["context_tokens"], each["turns_in_flight"]) for each in one["agents"]] == [
        (names["other"].branch, 21, 1)
    ]
    assert {each["tenant"] for each in await found("my session")} == {"acme", "other"}
    assert [each["run"] for each in await found("my session", tenant="acme")] == [names["acme"].run]
    assert await found("another session") == []
