"""vLLM's own control endpoints through the fleet: every instance is told, and who failed is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.errors import UnknownModelError
from dualmap.router.http.paths import ABORT_PATH, ENGINE_CONTROL_PATHS
from dualmap.router.peer_client import PeerClient
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from tests.router import tools

OF_EVERY_ENGINE = {path: method for path, method in ENGINE_CONTROL_PATHS.items() if "lora" not in path}
"""Those that are passed to all in any case. Adapters are registered (``test_adapters.py``)."""


class Engine:
    """A server that answers every request alike, and remembers them."""

    def __init__(self, status: int, body: bytes) -> None:
        self.answer = status, body
        self.answers: dict[bytes, tuple[int, bytes]] = {}
        """Those of single paths."""
        self.models: list[str] | None = None
        """The names that it lists; None: it answers for them as for anything else."""
        self.asked: list[bytes] = []
        self.url = ""

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length:")
        self.asked.append(head + await reader.readexactly(int(length.split()[0]) if length else 0))
        status, body = self.answers.get(head.split(b" ")[1].partition(b"?")[0], self.answer)
        if self.models is not None and head.startswith(b"GET /v1/models "):
            status, body = 200, orjson.dumps({"data": [{"id": each, "parent": "default"} for each in self.models]})
        writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n" % status)
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
        writer.close()


StartEngine = Callable[..., Awaitable[Engine]]


@pytest.fixture
async def engine() -> AsyncIterator[StartEngine]:
    servers: list[asyncio.Server] = []

    async def start(status: int = 200, body: bytes = b"") -> Engine:
        made = Engine(status, body)
        servers.append(await made.open())
        return made

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize(("path", "method"), OF_EVERY_ENGINE.items())
async def test_every_instance_is_told_and_what_all_say_is_the_answer(
    start_runtime: Any, client_of: Any, engine: StartEngine, path: str, method: str
) -> None:
    engines = [await engine(200, b'{"told":1}') for _ in range(3)]
    specs = [tools.spec(name, url=each.url) for name, each in zip("abc", engines, strict=True)]
    client = client_of(await start_runtime(instances=(*specs, tools.spec("off", state=InstanceState.STANDBY))))

    answer = await client.request(method, f"{path}?pool=default&level=2&tags=x&tags=y", content=b'{"a":1}')

    assert (answer.status_code, answer.content) == (200, b'{"told":1}')
    for each in engines:
        (asked,) = each.asked
        assert asked.startswith(f"{method} {path}?level=2&tags=x&tags=y HTTP/1.1".encode())
        assert asked.endswith(b'{"a":1}')


ACME = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("client-key")),))


@pytest.mark.parametrize("access", [{"api_keys": ("client-key",)}, {"tenants": (ACME,)}], ids=["api key", "tenant"])
async def test_requests_are_aborted_wherever_they_are_with_the_key_of_a_client(
    start_runtime: Any, client_of: Any, engine: StartEngine, access: dict[str, Any]
) -> None:
    engines = [await engine(200) for _ in range(3)]
    specs = [tools.spec(name, url=each.url) for name, each in zip("abc", engines, strict=True)]
    runtime = await start_runtime(instances=tuple(specs), **access)
    client, caller = client_of(runtime), runtime.tenants.caller({b"x-api-key": b"client-key"}.get)
    await runtime.intake.place(tools.request(request_id="r", caller=caller))

    refused = await client.post(ABORT_PATH, json={"request_ids": ["r"]})
    answer = await client.post(ABORT_PATH, json={"request_ids": ["r"]}, headers={"authorization": "Bearer client-key"})

    assert (refused.status_code, answer.status_code, answer.content) == (401, 200, b"")
    assert [each.asked[0].endswith(b'{"request_ids":["r"]}') for each in engines] == [True] * 3
    assert not any(b"Bearer client" in each.asked[0] for each in engines)


async def test_requests_that_their_client_ends_are_marked_and_an_engine_without_that_says_how_to_start_it(
    start_runtime: Any, client_of: Any, engine: StartEngine
) -> None:
    made = await engine(403, b'{"error":"disabled"}')
    runtime = await start_runtime(instances=(tools.spec("a", url=made.url),))
    ended = await runtime.intake.place(tools.request(request_id="r"))
    other = await runtime.intake.place(tools.request(request_id="s"))

    answer = await client_of(runtime).post(ABORT_PATH, json={"request_ids": ["cmpl-r-0", "unknown", 7]})

    assert (ended.abort_requested, other.abort_requested) == (True, False)
    assert answer.status_code == 403
    assert "--enable-scale-out" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["", "acme-secret", "other-secret"])
async def test_the_replica_that_serves_a_request_knows_of_its_end_before_the_engine(
    start_runtime: Any, client_of: Any, engine: StartEngine, store: Any, key: str
) -> None:
    made = await engine()
    tenants = [
        TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),))
        for name in ("acme", "other")
    ]
    more: dict[str, Any] = {"tenants": tenants} if key else {}
    asked, serving = [await start_runtime(instances=(tools.spec("a", url=made.url),), **more) for _ in range(2)]
    caller = serving.tenants.caller({b"x-api-key": b"acme-secret"}.get) if key else None
    live, other = [await serving.intake.place(tools.request(request_id=name, caller=caller)) for name in ("r", "s")]
    urls = {"replica-2": "http://two", "dead": "http://dead"}
    for name, url in urls.items():
        await store.pool("default").heartbeat(name, 60_000, {"ops_url": url})
    seen: list[tuple[str, int]] = []
    side = client_of(serving)

    async def peer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.host, len(made.asked)))
        if request.url.host == "dead":
            raise httpx.ConnectError("nobody listens")
        answer: httpx.Response = await side.send(request)
        return answer

    asked.peer_client = PeerClient(httpx.MockTransport(peer))
    headers = {"x-api-key": key} if key else {}

    answer = await client_of(asked).post(ABORT_PATH, json={"request_ids": ["cmpl-r-0"]}, headers=headers)

    is_own = key != "other-secret"
    assert answer.status_code == (200 if is_own else 404)
    assert (live.abort_requested, other.abort_requested) == (is_own, False)
    assert sorted(seen) == ([("dead", 0), ("two", 0)] if is_own else [])
    assert len(made.asked) == is_own, "engines are called once, by the replica that was called"


async def test_a_tenant_ends_no_request_but_its_own(start_runtime: Any, client_of: Any, engine: StartEngine) -> None:
    made = await engine()
    tenants = [
        TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),))
        for name in ("acme", "other")
    ]
    one = await start_runtime(instances=(tools.spec("a", url=made.url),), tenants=tenants)
    two = await start_runtime(tenants=tenants)
    for runtime, name in ((one, "acme"), (two, "other"), (two, "acme")):
        caller = runtime.tenants.caller({b"x-api-key": f"{name}-secret".encode()}.get)
        replica = "one" if runtime is one else "two"
        await runtime.intake.place(tools.request(request_id=f"{name}-on-{replica}", caller=caller))
    client = client_of(one)

    async def abort(key: str, *ids: str) -> tuple[int, bytes]:
        made.asked.clear()
        headers = {"x-api-key": f"{key}-secret"}
        answer = await client.post(ABORT_PATH, json={"request_ids": ids}, headers=headers)
        return answer.status_code, b"".join(each.rpartition(b"\r\n")[2] for each in made.asked)

    ids = ("cmpl-acme-on-one", "generate-tokens-acme-on-two", "other-on-two", "unknown")
    assert await abort("acme", *ids) == (200, b'{"request_ids":["cmpl-acme-on-one","generate-tokens-acme-on-two"]}')
    assert await abort("other", *ids) == (200, b'{"request_ids":["other-on-two"]}')
    assert await abort("other", "acme-on-one") == (404, b"")
    assert await abort("other", "unknown") == (404, b"")
    # An id that can mean a request of two tenants is neither's to end.
    own = runtime.tenants.caller({b"x-api-key": b"acme-secret"}.get)
    await two.intake.place(tools.request(request_id="cmpl-other-on-two", caller=own))
    assert await abort("acme", "cmpl-other-on-two") == (404, b"")
    for body in (b"", b"[]", b'{"request_ids": 7}', b'{"request_ids": [7]}'):
        answer = await client.post(ABORT_PATH, content=body, headers={"x-api-key": "acme-secret"})
        assert answer.status_code == 400


async def test_who_failed_is_named_with_what_it_said(start_runtime: Any, client_of: Any, engine: StartEngine) -> None:
    good, bad, gone = await engine(), await engine(500, b"no profiler"), "http://127.0.0.1:9"
    urls = {"a": good.url, "b": bad.url, "c": gone}
    client = client_of(await start_runtime(instances=tuple(tools.spec(name, url=url) for name, url in urls.items())))

    answer = await client.post("/start_profile")

    assert answer.status_code == 502
    message = answer.json()["error"]["message"]
    assert "failed at 2 of 3 instances: b: 500 no profiler; c: " in message and "took effect at a" in message


async def test_what_no_instance_has_says_how_to_start_vllm(
    start_runtime: Any, client_of: Any, engine: StartEngine
) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a", url=(await engine(404)).url),)))

    answer = await client.post("/reset_prefix_cache")

    assert answer.status_code == 404 and "VLLM_SERVER_DEV_MODE=1" in answer.json()["error"]["message"]


async def test_states_that_differ_are_told_by_instance(start_runtime: Any, client_of: Any, engine: StartEngine) -> None:
    asleep, awake = await engine(200, b'{"is_sleeping":true}'), await engine(200, b'{"is_sleeping":false}')
    urls = {"a": asleep.url, "b": awake.url}
    client = client_of(await start_runtime(instances=tuple(tools.spec(name, url=url) for name, url in urls.items())))

    answer = (await client.get("/is_sleeping")).json()

    assert answer == {"instances": {"a": {"is_sleeping": True}, "b": {"is_sleeping": False}}}


@pytest.mark.parametrize(("success", "hit_blocks"), [(b"true", 0), (b"false", 1)])
async def test_after_a_reset_the_fleet_believes_nothing_cached_where_it_took_place(
    start_runtime: Any, client_of: Any, store: Any, engine: StartEngine, success: bytes, hit_blocks: int
) -> None:
    made = await engine(200, b'{"success": %b}' % success)
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),)))
    pool, placement = store.pool("default"), tools.placement("r", tokens=48)
    await pool.place(placement)
    assert (await pool.observe(("a",), placement.chain)).loads["a"].hit_blocks == 1

    answer = await client.post("/reset_prefix_cache")

    assert answer.json() == {"success": success == b"true"}
    assert (await pool.observe(("a",), placement.chain)).loads["a"].hit_blocks == hit_blocks


async def test_they_need_the_admin_key_which_no_instance_gets(
    start_runtime: Any, client_of: Any, engine: StartEngine
) -> None:
    made = await engine()
    runtime = await start_runtime(instances=(tools.spec("a", url=made.url),), admin_key="secret", api_keys=("client",))
    client = client_of(runtime)

    refused = [
        (await client.request(method, path, headers=headers)).status_code
        for path, method in ENGINE_CONTROL_PATHS.items()
        for headers in ({}, {"authorization": "Bearer client"})
    ]
    assert set(refused) == {401} and not made.asked
    assert (await client.post("/stop_profile", headers={"authorization": "Bearer secret"})).status_code == 200
    assert b"secret" not in made.asked[0]


async def test_an_adapter_is_of_one_pool(start_runtime: Any, client_of: Any, engine: StartEngine) -> None:
    made = await engine()
    pools = (PoolSettings(name="one", model="m1"), PoolSettings(name="two", model="m2"))
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),), pools=pools))
    named = {"lora_name": "sql"}

    assert (await client.post("/v1/unload_lora_adapter", json=named)).status_code == 400
    assert (await client.post("/v1/unload_lora_adapter?pool=two", json=named)).status_code == 200
    assert [each.split()[1].partition(b"?")[0] for each in made.asked] == [
        b"/v1/unload_lora_adapter", b"/reset_prefix_cache", b"/v1/models",
    ]  # fmt: skip


async def test_an_adapter_that_was_just_loaded_or_unloaded_is_known_to_every_replica(
    start_runtime: Any, client_of: Any, engine: StartEngine, clock: Any
) -> None:
    engines = {name: await engine(200, b'{"data":[{"id":"default"}]}') for name in "ab"}
    for each in engines.values():
        each.models = ["default"]
    specs = [tools.spec(name, url=each.url) for name, each in engines.items()]
    one, two = await start_runtime(instances=tuple(specs)), await start_runtime()
    caller = {"lora_name": "sql", "lora_path": "/sql"}

    for each in engines.values():
        each.models = ["default", "sql"]
    assert (await client_of(one).post("/v1/load_lora_adapter", json=caller)).status_code == 200
    (await two.intake.place(tools.request(model="sql"))).finish(Outcome.COMPLETED)
    assert "sql" in [card["id"] for card in (await client_of(two).get("/v1/models")).json()["data"]]

    for each in engines.values():
        each.models = ["default"]
    assert (await client_of(one).post("/v1/unload_lora_adapter", json=caller)).status_code == 200
    assert "sql" not in [card["id"] for card in (await client_of(two).get("/v1/models")).json()["data"]]
    with pytest.raises(UnknownModelError):
        await two.intake.place(tools.request(model="sql"))


async def test_ranks_of_one_server_are_told_once(start_runtime: Any, client_of: Any, engine: StartEngine) -> None:
    made = await engine()
    ranks = tuple(tools.spec(f"a-{rank}", url=made.url, data_parallel_rank=rank) for rank in range(2))
    client = client_of(await start_runtime(instances=ranks))

    assert (await client.post("/stop_profile")).status_code == 200
    assert len(made.asked) == 1


@pytest.mark.parametrize(
    ("path", "resets"),
    [("/v1/unload_lora_adapter", True), ("/v1/unload_lora_adapter?keep_prefix_cache=true", False)],
)
async def test_the_kv_of_an_adapter_that_engines_had_by_themselves_is_dropped_with_it(
    start_runtime: Any, client_of: Any, store: Any, engine: StartEngine, path: str, resets: bool
) -> None:
    """vLLM itself answers for new weights at the same path from the old ones' KV."""
    made = await engine(200, b"done.")
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),)))
    pool, placement = store.pool("default"), tools.placement("r", tokens=48)
    await pool.place(placement)

    answer = await client.post(path, json={"lora_name": "sql-writer"})

    assert (answer.status_code, answer.content) == (200, b"done.")
    told = [asked.split(b" ")[1] for asked in made.asked if not asked.startswith(b"GET /v1/models ")]
    expected = [path.partition("?")[0].encode()]
    assert told[:1] == expected, "the parameter is the router's"
    assert [each.partition(b"?")[0] for each in told[1:]] == [b"/reset_prefix_cache"] * resets
    assert all(b"reset_running_requests=true" in each and b"reset_external=true" in each for each in told[1:])
    assert (await pool.observe(("a",), placement.chain)).loads["a"].hit_blocks == (not resets)


async def test_an_engine_whose_prefix_cache_cannot_be_emptied_is_told_apart(
    start_runtime: Any, client_of: Any, engine: StartEngine
) -> None:
    made = await engine(200, b'{"success": false}')
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),)))
    made.answers = {b"/reset_prefix_cache": (404, b"{}"), b"/v1/unload_lora_adapter": (200, b"done.")}

    answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": "sql-writer"})

    assert answer.status_code == 200
    assert answer.text.startswith("done. Its prefix cache was not emptied")


@pytest.mark.parametrize(
    ("call", "hit_blocks", "state"),
    [
        ("/pause", 0, "down"),
        ("/pause?mode=wait", 0, "down"),
        ("/pause?mode=keep&clear_cache=false", 1, "down"),
        ("/pause?clear_cache=0", 1, "down"),
        ("/sleep", 0, "down"),
        ("/sleep?level=1", 0, "down"),
        ("/sleep?level=2", 0, "down"),
        ("/sleep?level=0", 1, "down"),
        ("/reset_prefix_cache", 0, "ready"),
        ("/release_kv_cache_memory", 0, "ready"),
        ("/resume", 1, "ready"),
        ("/wake_up", 1, "ready"),
        ("/reset_mm_cache", 1, "ready"),
    ],
)
async def test_an_engine_that_is_paused_or_put_to_sleep_gets_no_requests_and_what_it_forgets_the_fleet_forgets(
    start_runtime: Any, client_of: Any, store: Any, engine: StartEngine, call: str, hit_blocks: int, state: str
) -> None:
    made = await engine(200, b"{}")
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),)))
    pool, placement = store.pool("default"), tools.placement("r", tokens=48)
    await pool.place(placement)

    assert (await client.post(call)).status_code == 200

    assert (await pool.observe(("a",), placement.chain)).loads["a"].hit_blocks == hit_blocks
    assert (await pool.membership()).instances["a"].state == state


@pytest.mark.parametrize(("status", "hit_blocks"), [(404, 1), (400, 1), (500, 0)])
async def test_a_pause_that_failed_takes_nothing_out_and_one_that_may_have_taken_place_leaves_no_cache(
    start_runtime: Any, client_of: Any, store: Any, engine: StartEngine, status: int, hit_blocks: int
) -> None:
    made = await engine(status, b"{}")
    client = client_of(await start_runtime(instances=(tools.spec("a", url=made.url),)))
    pool, placement = store.pool("default"), tools.placement("r", tokens=48)
    await pool.place(placement)

    await client.post("/pause")

    assert (await pool.observe(("a",), placement.chain)).loads["a"].hit_blocks == hit_blocks
    assert (await pool.membership()).instances["a"].state is InstanceState.READY


async def test_engines_that_are_paused_or_asleep_are_called_and_those_that_are_ill_are_not(
    start_runtime: Any, client_of: Any, engine: StartEngine
) -> None:
    states = (InstanceState.READY, InstanceState.DOWN, InstanceState.STANDBY, InstanceState.DOWN)
    engines = [await engine(200, b'{"is_sleeping": true}') for _ in states]
    engines[3].answer = 200, b'{"is_sleeping": false}'
    specs = [tools.spec(f"{state}-{at}", url=engines[at].url, state=state) for at, state in enumerate(states)]
    gone = tools.spec("gone", url="http://127.0.0.1:1", state=InstanceState.DOWN)
    client = client_of(await start_runtime(instances=(*specs, gone)))

    assert (await client.post("/resume")).status_code == 200

    called = [any(each.startswith(b"POST /resume ") for each in made.asked) for made in engines]
    assert called == [True, True, True, False]


async def test_one_that_drains_is_parked_so_that_waking_it_up_does_not_return_it(
    start_runtime: Any, client_of: Any, store: Any, engine: StartEngine
) -> None:
    made = await engine(200, b"{}")
    spec = tools.spec("a", url=made.url, state=InstanceState.DRAINING)
    client = client_of(await start_runtime(instances=(spec,)))

    await client.post("/sleep")

    assert (await store.pool("default").membership()).instances["a"].state is InstanceState.STANDBY
