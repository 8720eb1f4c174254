"""Instances through /admin: each change reaches every replica, and only legal ones happen."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from dualmap.cli.instances import troubles
from dualmap.router.http.asgi_bridge import CLIENT_NAME
from dualmap.router.serving.app import create_app
from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.kv_views import KvChange, KvViewStatus
from tests.router import tools


async def test_an_instance_is_added_starting_and_listed_with_its_load(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))

    added = await client.post(
        "/admin/instances", json={"id": "b", "url": "http://b:8000/", "prefill_tokens_per_s": 500}
    )

    assert added.status_code == 201
    assert (added.json()["state"], added.json()["url"]) == ("starting", "http://b:8000")
    listed = (await client.get("/admin/instances")).json()["instances"]
    assert {instance["id"]: instance["state"] for instance in listed} == {"a": "ready", "b": "starting"}
    assert listed[1]["load"]["pending_tokens"] == 0
    assert listed[1]["prefill_tokens_per_s"] == 500


async def test_each_instance_is_listed_with_how_its_cache_is_known(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"), tools.spec("b"))))
    events = store.pool("default").kv_events
    await events.renew_subscriber("worker", 60_000)
    for name, status, reason in (("a", KvViewStatus.EXACT, ""), ("b", KvViewStatus.ESTIMATE, "a group of a kind")):
        await events.mark(name, (await events.claim(name, "worker")).fence, status, reason)

    listed = (await client.get("/admin/instances")).json()["instances"]

    assert [(each["kv_view"], each["kv_view_reason"]) for each in listed] == [
        ("exact", None),
        ("estimate", "a group of a kind"),
    ]
    assert troubles(listed) == ["b: its cache is known as estimate: a group of a kind"]


async def test_an_instance_is_listed_with_its_part_in_pulls_or_why_it_has_none(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"), tools.spec("b"), tools.spec("c"))))
    pool = store.pool("default")
    host = InstanceTier(Tier.HOST, 1000, LoadPrice(0.0, 1e-6))
    end = PullEnd("10.0.0.7", 5710, "x", LoadPrice(0.03, 2e-5), "nothing was loaded yet", fails_requests=True)
    for name, tiers in (
        ("a", InstanceTiers(pulls=end)),
        ("b", InstanceTiers(no_pulls="its place is unknown")),
        ("c", InstanceTiers((host,), pulls=end)),
    ):
        await pool.tiers.describe(name, tiers)
    await pool.kv_events.renew_subscriber("worker", 60_000)
    claim = await pool.kv_events.claim("c", "worker")
    await pool.kv_events.apply("c", claim.fence, KvChange(0, 1.0, hit_step_tokens=100))

    a, b, c = (await client.get("/admin/instances")).json()["instances"]

    assert (a["pulls"]["port"], a["pulls"]["reason"], a["pulls"]["fails_requests"]) == (
        5710,
        "nothing was loaded yet",
        True,
    )
    assert (a["no_pulls"], b["pulls"], b["no_pulls"]) == (None, None, "its place is unknown")
    assert c["pulls"] is None
    assert "several cache groups" in c["no_pulls"] == c["unused_tiers"]


async def test_a_taken_id_and_an_unknown_one_are_told_apart(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))

    taken = await client.post("/admin/instances", json={"id": "a", "url": "http://other:1"})
    unknown = [
        await client.patch("/admin/instances/x", json={"max_running_requests": 1}),
        await client.post("/admin/instances/x/drain"),
        await client.delete("/admin/instances/x"),
    ]

    assert taken.status_code == 409
    assert [answer.status_code for answer in unknown] == [404, 404, 404]


async def test_an_update_changes_what_it_names_and_nothing_else(start_runtime: Any, client_of: Any, store: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a", kv_capacity_tokens=7),)))

    await client.patch("/admin/instances/a", json={"max_running_requests": 3})

    spec = (await store.pool("default").membership()).instances["a"]
    assert (spec.max_running_requests, spec.kv_capacity_tokens, spec.state) == (3, 7, InstanceState.READY)


async def test_an_update_leaves_alone_what_others_change_at_the_same_time(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    tampered, pool = tools.Tampered(store), store.pool("default")
    client = client_of(await start_runtime(instances=(tools.spec("a"), tools.spec("b")), through=lambda _: tampered))
    others = {
        "a": lambda: pool.members.update_instance("a", {"kv_capacity_tokens": 7}),
        "b": lambda: pool.members.remove_instance("b"),
    }

    async def change_first(named: Any, *_: Any, **__: Any) -> None:
        await others[named if isinstance(named, str) else named.instance_id]()

    tampered.before["update_instance"] = tampered.before["put_instance"] = change_first
    changed = await client.patch("/admin/instances/a", json={"max_running_requests": 3})
    removed = await client.patch("/admin/instances/b", json={"max_running_requests": 3})

    assert (changed.json()["max_running_requests"], changed.json()["kv_capacity_tokens"]) == (3, 7)
    assert removed.status_code == 404
    assert set((await pool.membership()).instances) == {"a"}


async def test_a_url_is_kept_without_its_last_slash_however_it_comes(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))

    changed = await client.patch("/admin/instances/a", json={"url": "http://elsewhere:8000/vllm/"})
    wrong = await client.patch("/admin/instances/a", json={"url": "elsewhere:8000"})

    assert changed.json()["url"] == "http://elsewhere:8000/vllm"
    assert (await store.pool("default").membership()).instances["a"].url == "http://elsewhere:8000/vllm"
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "url")


async def test_a_url_with_a_password_is_refused_and_not_shown(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))
    url = "http://bob:hunter2@elsewhere:8000"

    for refused in (
        await client.post("/admin/instances", json={"id": "b", "url": url}),
        await client.patch("/admin/instances/a", json={"url": url}),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "url")
        assert "hunter2" not in refused.text and "router.upstream_api_key" in refused.text


async def test_what_no_store_could_add_up_is_refused_and_nothing_breaks(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))

    as_json = {"content-type": "application/json"}
    fast = b'{"id": "b", "url": "http://b:1", "prefill_tokens_per_s": %s}'
    refused = [
        await client.post("/admin/instances", content=fast % b"1e308", headers=as_json),
        await client.post("/admin/instances", content=fast % b"1e999", headers=as_json),
        await client.post("/admin/instances", json={"id": "b", "url": "http://127.0.0.1:99999"}),
        await client.post("/admin/instances", json={"id": "..", "url": "http://b:1"}),
        await client.patch("/admin/instances/a", content=b'{"prefill_tokens_per_s": 1e999}', headers=as_json),
        await client.patch("/admin/instances/a", json={"kv_capacity_tokens": 10**30}),
        await client.patch("/admin/instances/a", json={"url": "http://h:0"}),
    ]

    assert [answer.status_code for answer in refused] == [400] * len(refused)
    assert "1000000000" in refused[0].json()["error"]["message"]
    assert "finite" in refused[1].json()["error"]["message"]
    listed = await client.get("/admin/instances")
    assert [instance["id"] for instance in listed.json()["instances"]] == ["a"]


async def test_a_second_id_for_the_same_server_is_warned_of(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"), tools.spec("b"))))
    url = (await client.get("/admin/instances")).json()["instances"][0]["url"]

    twin = await client.post("/admin/instances", json={"id": "c", "url": url})
    moved = await client.patch("/admin/instances/b", json={"url": url})
    own = await client.patch("/admin/instances/b", json={"max_running_requests": 3})
    other = await client.post("/admin/instances", json={"id": "d", "url": "http://elsewhere:1"})

    assert (twin.status_code, other.status_code) == (201, 201)
    assert twin.json()["warning"] == f"'a' has the URL {url} already: that server counts twice now"
    assert url in moved.json()["warning"]
    assert (own.json()["warning"], other.json()["warning"]) == (None, None)


async def test_draining_and_resuming_reach_the_other_replica(start_runtime: Any, client_of: Any, clock: Any) -> None:
    one = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    other = await start_runtime()
    client = client_of(one)

    drained = await client.post("/admin/instances/a/drain")
    assert drained.json()["state"] == "draining"
    await clock.advance(1.1)
    assert other.pools.pools["default"].view.view.ready == ("b",)

    resumed = await client.post("/admin/instances/a/resume")
    assert resumed.json()["state"] == "ready"
    await clock.advance(1.1)
    assert other.pools.pools["default"].view.view.ready == ("a", "b")


async def test_an_idle_instance_is_removed_at_once(start_runtime: Any, client_of: Any, store: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))

    assert (await client.delete("/admin/instances/a")).status_code == 204
    assert (await store.pool("default").membership()).instances == {}


async def test_a_busy_instance_drains_first_and_is_removed_when_it_is_done(
    start_runtime: Any, client_of: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client = client_of(runtime)
    request = await runtime.intake.place(tools.request())

    refused = await client.delete("/admin/instances/a?wait_s=0")
    assert refused.status_code == 409
    assert "1 running" in refused.json()["error"]["message"]
    assert (await store.pool("default").membership()).instances["a"].state is InstanceState.DRAINING

    removing = asyncio.create_task(client.delete("/admin/instances/a?wait_s=5"))
    await tools.settle()
    request.finish(Outcome.COMPLETED)
    await clock.advance(0.5)

    assert (await removing).status_code == 204
    assert (await store.pool("default").membership()).instances == {}


async def test_ranks_of_one_server_are_no_twins(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))
    url = "http://ranks:8000"

    first, second = [
        await client.post("/admin/instances", json={"id": f"r{rank}", "url": url, "data_parallel_rank": rank})
        for rank in (0, 1)
    ]
    twin = await client.post("/admin/instances", json={"id": "twin", "url": url, "data_parallel_rank": 1})

    assert (first.json()["warning"], second.json()["warning"]) == (None, None)
    assert second.json()["data_parallel_rank"] == 1
    assert "counts twice" in twin.json()["warning"]


async def test_endpoints_of_kv_events_are_refused_by_name(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),)))
    events = {"endpoint": "tcp://{host}:5557"}

    refused = await client.post("/admin/instances", json={"id": "x", "url": "http://x:1", "kv_events": events})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_events"


async def test_who_did_what_to_instances_is_kept_logged_and_among_what_happened(
    start_runtime: Any, client_of: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    admins = [{"name": "alice", "key": "alice-key-0123456789"}]
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("c")), admins=admins, admin_key="shared-key")
    alice = client_of(runtime, headers={"authorization": "Bearer alice-key-0123456789"})
    shared = client_of(runtime, headers={"authorization": "Bearer shared-key"})

    with caplog.at_level(logging.INFO):
        await alice.post("/admin/instances", json={"id": "b", "url": "http://b:8000"})
        await alice.patch("/admin/instances/b", json={"max_running_requests": 3})
        await alice.post("/admin/instances/a/drain?within_s=60")
        await shared.post("/admin/instances/a/resume", headers={"x-dualmap-by": "bob@desk"})
        assert (await shared.delete("/admin/instances/c")).status_code == 204
        refused = [
            await alice.post("/admin/instances/x/drain"),
            await client_of(runtime).post("/admin/instances/a/drain"),
        ]
    assert [answer.status_code for answer in refused] == [404, 401]

    told = (await alice.get("/admin/instances/history")).json()
    assert [(each["by"], each["action"], each["instance"], each["detail"]) for each in told] == [
        ("127.0.0.1", "remove", "c", ""),
        ("bob@desk (unverified) from 127.0.0.1", "resume", "a", ""),
        ("alice", "drain", "a", "within 60 s"),
        ("alice", "change", "b", "max_running_requests=3"),
        ("alice", "add", "b", "http://b:8000"),
    ]
    assert all(each["at_ms"] > 0 and each["pool"] == "default" for each in told)
    assert [each["instance"] for each in (await alice.get("/admin/instances/history?instance=b")).json()] == ["b", "b"]
    assert len((await alice.get("/admin/instances/history?limit=1")).json()) == 1
    assert "instance a of pool default: drain by alice: within 60 s" in caplog.text
    happened = [each.text for each in await store.pool("default").chronicle.happened(9)]
    assert happened[2] == "alice: drain a (within 60 s)"


async def test_a_removal_that_waits_for_requests_is_one_change_however_often_it_is_repeated(
    start_runtime: Any, client_of: Any, clock: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    request = await runtime.intake.place(tools.request())
    client = client_of(runtime)

    for _ in range(3):
        assert (await client.delete("/admin/instances/a?wait_s=0")).status_code == 409
    request.finish(Outcome.COMPLETED)
    await clock.advance(1.0)
    assert (await client.delete("/admin/instances/a?wait_s=0")).status_code == 204

    changes = await store.pool("default").chronicle.member_changes(9)
    assert [(each.action, each.detail) for each in changes] == [("remove", ""), ("remove", "it drains first")]


async def test_a_certificate_names_who_changes_something(start_runtime: Any, store: Any) -> None:
    app = create_app(await start_runtime(instances=(tools.spec("a"),)))

    async def shown(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, CLIENT_NAME: "ops.example"}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(shown), base_url="http://replica") as client:
        await client.post("/admin/instances/a/drain", headers={"x-dualmap-by": "eve"})

    [change] = await store.pool("default").chronicle.member_changes(9)
    assert change.by == "ops.example"
