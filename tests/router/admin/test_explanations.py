"""Why a request went where it went, asked of any replica."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from email.message import Message
from typing import Any

import orjson
import pytest

from dualmap.router.admin.explanations import meant_by
from dualmap.router.requests.explain import REASONS
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.placing.decision import Reason
from dualmap.scheduling.request.outcome import Outcome
from dualmap.statestore.kv_views import KvViewStatus
from tests.router import tools
from tests.router.admin.peer_server import answering, peer_server


async def test_the_story_tells_loads_decision_and_end(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request("x" * 400, request_id="one"))
    request.finish(Outcome.COMPLETED)

    story = (await client_of(runtime).get("/admin/explain/one")).json()

    assert story["replica_id"] == "replica-1"
    assert story["outcome"] == "completed"
    assert story["expected_ttft_s"] == pytest.approx(0.1), "100 tokens at 1,000 a second"
    assert story["instance_id"] == request.machine.instance_id
    told = story["rounds"][0]
    assert set(told["loads"]) == {"a", "b"}
    assert told["decision"]["reason"] == "balance"
    assert told["status"] == "dispatched"
    assert [entry["request_id"] for entry in (await client_of(runtime).get("/admin/explain")).json()] == ["one"]


class Lazy(Mapping[str, Any]):
    """Loads as a store replies them: no dictionary."""

    def __init__(self, loads: Mapping[str, Any]) -> None:
        self._loads = loads

    def __getitem__(self, name: str) -> Any:
        return self._loads[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)


async def test_it_says_why_the_cache_of_a_candidate_is_only_estimated(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    events = store.pool("default").kv_events
    await events.renew_subscriber("worker", 60_000)
    for name, reason in (("a", ""), ("b", "hits of a cache group of kind 'new' are not known")):
        status = KvViewStatus.ESTIMATE if reason else KvViewStatus.EXACT
        await events.mark(name, (await events.claim(name, "worker")).fence, status, reason)
    (await runtime.intake.place(tools.request("x" * 400, request_id="one"))).finish(Outcome.COMPLETED)

    story = (await client_of(runtime).get("/admin/explain/one")).json()

    assert story["doubts"] == {"b": "hits of a cache group of kind 'new' are not known"}


async def test_loads_that_are_read_when_they_are_asked_for_are_told_too(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    request = await runtime.intake.place(tools.request(request_id="one"))
    request.finish(Outcome.COMPLETED)
    explanation = runtime.context.decisions.get("one")
    (each,) = explanation.rounds
    runtime.context.decisions.add(replace(explanation, rounds=(replace(each, loads=Lazy(each.loads)),)))

    story = (await client_of(runtime).get("/admin/explain/one")).json()

    assert set(story["rounds"][0]["loads"]) == {"a", "b"}
    assert story["rounds"][0]["loads"]["a"]["instance_id"] == "a"


@pytest.mark.parametrize("sent", ["/admin/explain/team/a=1", "/admin/explain/team%2Fa%3D1"])
async def test_an_id_may_have_every_character_that_a_request_id_may_have(
    start_runtime: Any, client_of: Any, sent: str
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await runtime.intake.place(tools.request(request_id="team/a=1"))

    assert (await client_of(runtime).get(sent)).json()["request_id"] == "team/a=1"
    for listing in ("/admin/explain", "/admin/explain/"):
        answer = (await client_of(runtime).get(listing)).json()
        assert [entry["request_id"] for entry in answer] == ["team/a=1"]


async def test_a_request_under_way_tells_its_story_so_far_and_is_listed_before_those_that_ended(
    start_runtime: Any, client_of: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    (await runtime.intake.place(tools.request(request_id="ended"))).finish(Outcome.COMPLETED)
    for name in ("older", "newer"):
        await runtime.intake.place(tools.request(request_id=name))

    story = (await client_of(runtime).get("/admin/explain/older")).json()
    listed = (await client_of(runtime).get("/admin/explain")).json()

    assert (story["instance_id"], story["outcome"], story["done_s"]) == ("a", None, None)
    assert [entry["request_id"] for entry in listed] == ["newer", "older", "ended"]


async def test_no_more_live_requests_are_explained_than_are_listed(
    start_runtime: Any, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", dispatch_window_tokens=100_000),))
    for number in range(5):
        await runtime.intake.place(tools.request(request_id=f"r{number}"))
    explained: list[str] = []
    explain = LiveRequest.explain

    def counted(request: LiveRequest) -> Any:
        explained.append(request.request_id)
        return explain(request)

    monkeypatch.setattr(LiveRequest, "explain", counted)
    listed = (await client_of(runtime).get("/admin/explain?limit=2")).json()

    assert [entry["request_id"] for entry in listed] == explained == ["r4", "r3"]


async def test_a_live_request_of_a_replica_that_cannot_be_asked_is_told_by_its_record(
    start_runtime: Any, client_of: Any
) -> None:
    one = await start_runtime(instances=(tools.spec("a"),))
    other = await start_runtime()
    await one.intake.place(tools.request(request_id="far"))

    story = (await client_of(other).get("/admin/explain/far")).json()

    assert story["replica_id"] == "replica-1"
    assert story["record"]["instance_id"] == "a"


async def test_a_request_that_nobody_remembers_is_404(start_runtime: Any, client_of: Any) -> None:
    answer = await client_of(await start_runtime()).get("/admin/explain/none")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("no replica remembers request 'none'")


@pytest.fixture
def peer() -> Iterator[str]:
    """Another replica's operation side, as far as it is asked."""

    def answer(path: str, fields: Message) -> tuple[int, bytes]:
        asked = path == "/admin/explain/far%2Foff?local=true" and fields["authorization"] == "Bearer root"
        elsewhere = path.startswith("/other/")
        body = b"<html>" if elsewhere else orjson.dumps({"request_id": "far/off", "rounds": []})
        return 200 if asked or elsewhere else 404, body

    with peer_server(answer) as url:
        yield url


async def test_a_peer_that_placed_it_is_asked_with_the_same_key(
    start_runtime: Any, client_of: Any, store: Any, peer: str
) -> None:
    runtime = await start_runtime(admin_key="root")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
    await store.pool("default").heartbeat("dead-peer", 60_000, {"ops_url": dead})
    await store.pool("default").heartbeat("live-peer", 60_000, {"ops_url": peer})
    client = client_of(runtime, headers={"authorization": "Bearer root"})

    assert (await client.get("/admin/explain/far/off")).json() == {"request_id": "far/off", "rounds": []}
    assert (await client.get("/admin/explain/far/off?local=true")).status_code == 404


async def test_peers_that_could_not_be_asked_are_named(
    start_runtime: Any, client_of: Any, store: Any, peer: str
) -> None:
    runtime = await start_runtime(admin_key="root")
    pool = store.pool("default")
    await pool.heartbeat("knows-nothing", 60_000, {"ops_url": peer})
    await pool.heartbeat("no-address", 60_000, {})
    await pool.heartbeat("no-bracket", 60_000, {"ops_url": "http://fd00::7:80:80"})
    await pool.heartbeat("no-json", 60_000, {"ops_url": f"{peer}/other"})
    client = client_of(runtime, headers={"authorization": "Bearer root"})

    answer = await client.get("/admin/explain/none")
    here = await client.get("/admin/explain/none?local=true")

    message = answer.json()["error"]["message"]
    assert message.startswith("no-address, no-bracket, no-json could not be asked, and no other replica remembers")
    assert "the last 2048 that ended" in message
    assert here.json()["error"]["message"].startswith("this replica does not remember")


async def test_replicas_behind_one_address_are_not_said_to_have_forgotten(
    start_runtime: Any, client_of: Any, store: Any, peer: str
) -> None:
    runtime = await start_runtime(admin_key="root")
    pool = store.pool("default")
    for replica_id in (runtime.context.replica_id, "beside-it"):
        await pool.heartbeat(replica_id, 60_000, {"ops_url": peer})
    client = client_of(runtime, headers={"authorization": "Bearer root"})

    answer = await client.get("/admin/explain/none")

    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"2 replicas share {peer} and could not be asked one by one (set router.ops_port)")
    assert (await client.get("/admin/explain/far/off")).json() == {"request_id": "far/off", "rounds": []}


async def test_a_peer_is_asked_past_the_environments_proxy(
    start_runtime: Any, client_of: Any, store: Any, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    runtime = await start_runtime(admin_key="root")
    await store.pool("default").heartbeat("live-peer", 60_000, {"ops_url": peer})

    answer = await client_of(runtime, headers={"authorization": "Bearer root"}).get("/admin/explain/far/off")

    assert answer.json() == {"request_id": "far/off", "rounds": []}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("4f1c", "4f1c"),
        ("chatcmpl-4f1c", "4f1c"),
        ("cmpl-4f1c", "4f1c"),
        ("chatcmpl-team/a-1", "team/a-1"),
        ("msg_4f1c", "4f1c"),
        ("resp_4f1c", "4f1c"),
        ("resp_4f1c@instance-1", "4f1c"),
        ("resp_a@b@instance-1", "a@b"),
        ("score-4f1c", "4f1c"),
    ],
)
def test_an_id_of_an_answers_body_means_its_request(given: str, meant: str) -> None:
    assert meant in meant_by(given)
    assert meant_by(given)[0] == given


async def test_a_request_is_found_by_the_id_in_its_answer(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await runtime.intake.place(tools.request(request_id="one"))

    story = (await client_of(runtime).get("/admin/explain/resp_one%40a")).json()

    assert story["request_id"] == "one"
    assert story["rounds"][0]["why"] == "it is the only candidate"


def test_every_reason_has_its_words() -> None:
    assert set(REASONS) == set(Reason)


async def test_what_peers_remember_is_listed_beside_what_this_replica_does(
    start_runtime: Any, client_of: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    await runtime.intake.place(tools.request(request_id="own"))
    far = {"request_id": "far", "replica_id": "peer", "rounds": [], "received_unix_s": 1.0, "done_s": 2.0}
    with answering([far]) as url:
        await store.pool("default").heartbeat("peer", 60_000, {"ops_url": url})
        listed = (await client_of(runtime).get("/admin/explain")).json()
        own = (await client_of(runtime).get("/admin/explain?local=true")).json()

    assert [story["request_id"] for story in listed] == ["own", "far"]
    assert [story["request_id"] for story in own] == ["own"]
