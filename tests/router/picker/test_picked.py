"""One request that a gateway asks about: its messages are events of its life, and what they leave behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.picker.messages import BodyMode
from dualmap.router.picker.picked import UNANSWERED
from dualmap.router.prompts.inference_request import response_id
from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.picker_door import gateway_streams
from dualmap.router.settings import GatewaySettings, JwtSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import LimitSettings, TenantKeySettings, TenantSettings
from dualmap.scheduling.request.machine import Phase
from dualmap.scheduling.runs.turn import hashed_name
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.statestore.memory import MemoryStore
from tests.router.http.kit import eventually
from tests.router.picker.streams import (
    COMPLETIONS,
    DUPLEX,
    NO_MODE,
    STREAM,
    Gateway,
    answer_body,
    answer_head,
    body,
    head,
    prompt,
    trailers,
)
from tests.router.reached_adapters import serve
from tests.router.tools import spec
from tests.support.adapter_servers import AdapterServers
from tests.support.manual_clock import ManualClock, settle
from tests.support.signed_tokens import OTHER_RSA_KEY, RSA_KEY, jwk, jwks, token

StartRuntime = Callable[..., Awaitable[Runtime]]

ADDRESSES = {"a": "10.0.0.1:8000", "b": "10.0.0.2:8000", "c": "10.0.0.3:8000"}


def instance(name: str, **changes: Any) -> InstanceSpec:
    return spec(name, **{"url": f"http://{ADDRESSES[name]}", **changes})


MEMBERS = tuple(instance(name) for name in "abc")


def prompt_begins() -> Any:
    """The first piece of a body, of which more is to come."""
    return body(b'{"model": ', ends=False)


def only_live(gateway: Gateway) -> Any:
    (live,) = gateway.runtime.context.live
    return live


async def finished(task: asyncio.Task[None], gateway: Gateway) -> None:
    async with asyncio.timeout(20):
        await task
    assert gateway.leaves_nothing()
    await settle()
    pool = gateway.runtime.pools.pools["default"]
    snapshot = await pool.store.snapshot()
    assert all(load.pending_tokens == 0 and load.running_requests == 0 for load in snapshot.loads.values())


# the request side ------------------------------------------------------------------------------------------------
async def test_a_whole_body_is_answered_with_its_destination_first_and_then_sent_back(
    start_runtime: StartRuntime,
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head())
    await settle()
    assert stream.replies == [], "until it is placed another picker could take it over"

    sent = {"model": "default", "prompt": "hello", "stream": True}
    content = orjson.dumps(sent)
    stream.send(body(content[:10], ends=False), body(content[10:], ends=False), body(b""))
    await settle()

    assert stream.kinds == ["request_headers", "request_body"]
    assert len(stream.addresses) == 2
    assert set(stream.addresses) <= set(ADDRESSES.values())
    fields = stream.set_fields(stream.replies[0])
    assert fields["x-gateway-destination-endpoint"] == ",".join(stream.addresses), (
        "the header says what the metadata say"
    )
    assert stream.replies[0].request_headers.response.clear_route_cache
    streamed = stream.replies[1].request_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (content, True)
    assert ADDRESSES[only_live(gateway).machine.instance_id] == stream.addresses[0]
    assert gateway.plane.bodies.held_bytes == 0
    stream.end()
    await finished(task, gateway)


async def test_a_long_body_is_sent_back_in_pieces_that_end_once(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    content = orjson.dumps({"model": "default", "prompt": "x" * 200_000})
    stream, task = gateway.open(head(), body(content))
    await settle()

    pieces = [reply.request_body.response.body_mutation.streamed_response for reply in stream.replies[1:]]
    assert b"".join(piece.body for piece in pieces) == content
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    stream.end()
    await finished(task, gateway)


async def test_a_body_that_trailers_end_is_sent_back_and_so_are_they(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    content = orjson.dumps({"model": "default", "prompt": "hello"})
    stream, task = gateway.open(head(), body(content, ends=False), trailers("request_trailers"))
    await settle()

    assert stream.kinds == ["request_headers", "request_body", "request_trailers"]
    assert not stream.replies[1].request_body.response.body_mutation.streamed_response.end_of_stream
    stream.end()
    await finished(task, gateway)


async def test_a_buffered_body_comes_after_the_answer_to_the_head_and_is_answered_with_the_destination(
    start_runtime: StartRuntime,
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(modes=(BodyMode.BUFFERED, NO_MODE)))
    await settle()
    assert stream.kinds == ["request_headers"]

    stream.send(prompt())
    await settle()

    assert stream.kinds == ["request_headers", "request_body"]
    assert stream.choice is stream.replies[1]
    assert not stream.choice.request_body.response.HasField("body_mutation"), "it goes on as it came"
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_request_whose_body_never_comes_here_is_passed_on(start_runtime: StartRuntime, ends: bool) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    modes = (DUPLEX if ends else NO_MODE, NO_MODE)
    stream, task = gateway.open(head("/v1/audio/speech", method="GET" if ends else "POST", ends=ends, modes=modes))
    await settle()

    assert stream.kinds == ["request_headers"]
    assert only_live(gateway).explain() is None
    stream.end()
    await finished(task, gateway)


async def test_what_cannot_be_read_goes_on_as_it_came(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), body(b"{no json"))
    await settle()

    assert stream.replies[1].request_body.response.body_mutation.streamed_response.body == b"{no json"
    stream.end()
    await finished(task, gateway)


async def test_another_name_of_the_model_is_replaced_in_the_body(start_runtime: StartRuntime) -> None:
    pool = PoolSettings(aliases=("alias",))
    gateway = Gateway(await start_runtime(instances=MEMBERS, pools=(pool,)))
    stream, task = gateway.open(head(), prompt(model="alias"))
    await settle()

    sent = stream.replies[1].request_body.response.body_mutation.streamed_response.body
    assert orjson.loads(sent)["model"] == "default"
    stream.end()
    await finished(task, gateway)


async def test_a_gateway_that_buffers_gets_the_length_of_another_body(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, pools=(PoolSettings(aliases=("alias",)),)))
    stream, task = gateway.open(head(modes=(BodyMode.BUFFERED, NO_MODE)), prompt(model="alias"))
    await settle()

    sent = stream.choice.request_body.response.body_mutation.body
    assert stream.set_fields(stream.choice)["content-length"] == str(len(sent))
    stream.end()
    await finished(task, gateway)


async def test_headers_of_routing_are_not_taken_from_clients_and_the_keys_of_instances_are_added(
    start_runtime: StartRuntime,
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, upstream_api_key="secret", api_keys=("mine",)))
    named = {
        "x_prefiller_host_port": "evil:1",
        "x_prefiller_url": "http://evil",
        "authorization": "Bearer mine",
        "x_api_key": "mine",
    }
    stream, task = gateway.open(head(**named), prompt())
    await settle()

    mutation = stream.choice.request_headers.response.header_mutation
    assert set(mutation.remove_headers) == {"x-prefiller-host-port", "x-prefiller-url", "x-api-key"}
    assert stream.set_fields(stream.choice)["authorization"] == "Bearer secret"
    stream.end()
    await finished(task, gateway)


async def test_a_setting_trusts_clients_with_transfers(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, trust_transfers=True))
    named = {"x_prefiller_host_port": "mine:1", "x_data_parallel_rank": "1"}
    stream, task = gateway.open(head(**named), prompt(kv_transfer_params={"mine": 1}))
    await settle()

    mutation = stream.choice.request_headers.response.header_mutation
    assert set(mutation.remove_headers) == {"x-data-parallel-rank"}
    assert body_sent(stream)["kv_transfer_params"] == {"mine": 1}
    stream.end()
    await finished(task, gateway)


def body_sent(stream: Any) -> dict[str, Any]:
    """The body that an instance reads: of a doubled field the last one counts."""
    found: dict[str, Any] = orjson.loads(stream.replies[1].request_body.response.body_mutation.streamed_response.body)
    return found


async def test_no_client_steers_an_engine_by_its_body(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    steering = {"kv_transfer_params": {"remote_host": "evil"}, "vllm_xargs": {"kv_cache_report_mode": "full", "a": 1}}
    for path in (COMPLETIONS, "/inference/v1/generate", "/tokenize"):
        stream, task = gateway.open(head(path), prompt(**steering))
        await settle()

        assert body_sent(stream)["kv_transfer_params"] is None and body_sent(stream)["vllm_xargs"] == {"a": 1}
        stream.end()
        await finished(task, gateway)


@pytest.mark.parametrize(
    "path", ["/v1%2Fcompletions", "//v1/completions", "/v1/x/../completions", "/v1/completions/", "/v1/completions#x"]
)
async def test_the_path_that_is_judged_is_the_one_that_goes_on(start_runtime: StartRuntime, path: str) -> None:
    tenant = tenant_of("acme", models=("no-such",))
    gateway = Gateway(await start_runtime(instances=MEMBERS, api_keys=("of-no-tenant",), tenants=(tenant,)))
    stream, task = gateway.open(head(path, authorization="Bearer of-no-tenant"), prompt())
    await settle()

    assert stream.set_fields(stream.choice)[":path"] == COMPLETIONS
    assert only_live(gateway).explain() is not None, "it is scheduled"
    stream.end()
    await finished(task, gateway)

    stream, task = gateway.open(head(path, authorization="Bearer acme-secret"), prompt())
    await task
    assert stream.replies[0].immediate_response.status.code == 404


async def test_a_path_as_it_is_meant_is_not_written_again(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(COMPLETIONS + "?a=b%2Fc"), prompt())
    await settle()

    assert ":path" not in stream.set_fields(stream.choice)
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize("path", ["/v1%252Fcompletions", "/v1%5Ccompletions", "/v1/responses/x%2F..%2F..%2Fsleep"])
async def test_a_path_that_servers_read_differently_is_refused(start_runtime: StartRuntime, path: str) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(path), prompt())
    await task

    assert stream.replies[0].immediate_response.status.code == 400
    assert gateway.leaves_nothing()


@pytest.mark.parametrize(
    ("path", "status"), [("/v2/unknown", 403), ("/v1/audio/speech", 403), ("/v1/responses/r@a", 0), (COMPLETIONS, 0)]
)
async def test_a_pattern_for_all_paths_leaves_known_ones_open(
    start_runtime: StartRuntime, path: str, status: int
) -> None:
    runtime = await start_runtime(instances=MEMBERS, forbidden_paths=("/*", "/v1/audio/*"))
    gateway = Gateway(runtime)
    stream, task = gateway.open(head(path, method="GET" if "responses" in path else "POST"), prompt())
    await settle()

    if status:
        assert stream.replies[0].immediate_response.status.code == status
    else:
        assert stream.addresses
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize(
    "sent",
    [b'{"model":"default","prompt":"x","model":"other"}', '{"model":"default","prompt":"x"}'.encode("utf-16"), b"{no"],
)
async def test_a_body_that_is_not_read_as_an_engine_reads_it_is_refused_where_rights_depend_on_it(
    start_runtime: StartRuntime, sent: bytes
) -> None:
    tenant = tenant_of("acme", models=("default",))
    gateway = Gateway(await start_runtime(instances=MEMBERS, tenants=(tenant,)))
    stream, task = gateway.open(head(authorization="Bearer acme-secret"), body(sent))
    await task

    refusal = stream.replies[0].immediate_response
    assert refusal.status.code == 400 and b"models of its own" in refusal.body
    assert gateway.leaves_nothing()


@pytest.mark.parametrize("mode", [NO_MODE, BodyMode.STREAMED])
async def test_a_body_that_the_gateway_keeps_to_itself_is_refused_where_rights_depend_on_it(
    start_runtime: StartRuntime, mode: BodyMode
) -> None:
    tenants = (tenant_of("acme", models=("default",)), tenant_of("free"))
    gateway = Gateway(await start_runtime(instances=MEMBERS, tenants=tenants))
    stream, task = gateway.open(head(authorization="Bearer acme-secret", modes=(mode, NO_MODE)))
    await task
    refusal = stream.replies[0].immediate_response
    assert refusal.status.code == 400 and b"request_body_mode" in refusal.body

    stored = f"/v1/responses/{response_id('r', 'a', 'acme')}/cancel"
    for path, name, ends in ((COMPLETIONS, "free", False), (COMPLETIONS, "acme", True), (stored, "acme", False)):
        first = head(path, modes=(mode, NO_MODE), authorization=f"Bearer {name}-secret", ends=ends)
        stream, task = gateway.open(first)
        await settle()
        assert stream.addresses
        stream.end()
        await finished(task, gateway)


def tenant_of(name: str, **changes: Any) -> TenantSettings:
    return TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),), **changes)


async def test_a_rank_is_named_and_a_second_choice_of_another_rank_is_not(start_runtime: StartRuntime) -> None:
    ranks = tuple(instance(name, data_parallel_rank=number) for number, name in enumerate("ab"))
    gateway = Gateway(await start_runtime(instances=ranks))
    stream, task = gateway.open(head(), prompt())
    await settle()

    assert len(stream.addresses) == 1
    chosen = only_live(gateway).machine.target
    assert stream.set_fields(stream.choice)["x-data-parallel-rank"] == str(chosen.data_parallel_rank)
    stream.end()
    await finished(task, gateway)


async def test_one_choice_is_named_where_the_gateway_takes_one(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS), choices=1)
    stream, task = gateway.open(head(), prompt())
    await settle()
    assert len(stream.addresses) == 1
    stream.end()
    await finished(task, gateway)


async def test_the_gateway_is_given_the_instance_that_has_loaded_the_adapter_alone(
    start_runtime: StartRuntime, clock: ManualClock
) -> None:
    """It would send the request to a second choice before that has loaded it."""
    servers, hosts = AdapterServers(), {name: address.partition(":")[0] for name, address in ADDRESSES.items()}
    servers.add(*hosts.values())
    runtime = await start_runtime(instances=tuple(replace(each, models={"default": ""}) for each in MEMBERS))
    pool, sql = serve(runtime, servers, clock), RegisteredAdapter("/adapters/sql")
    await pool.store.adapters.change("sql", lambda former, known: sql)
    await pool.view.refresh()
    gateway = Gateway(runtime)
    stream, task = gateway.open(head(), prompt(model="sql"))
    await settle(80)

    (address,) = stream.addresses
    having = {host for host, server in servers.of.items() if "sql" in server.adapters}
    assert having == {address.partition(":")[0]}
    stream.end()
    await finished(task, gateway)


async def test_several_pools_are_told_apart_by_the_model(start_runtime: StartRuntime, store: MemoryStore) -> None:
    pools = (PoolSettings(name="one", model="m1"), PoolSettings(name="two", model="m2"))
    await store.pool("one").members.put_instance(instance("a"))
    await store.pool("two").members.put_instance(instance("b"))
    gateway = Gateway(await start_runtime(pools=pools))
    for number, (model, name) in enumerate([("m1", "a"), ("m2", "b")]):
        stream, task = gateway.open(head(x_request_id=f"r-{number}"), prompt(model=model))
        await settle()
        assert stream.addresses == [ADDRESSES[name]]
        stream.end()
        await settle()
        await task

    stream, task = gateway.open(head(), body(b"{no json"))
    await settle()
    assert stream.replies[0].immediate_response.status.code == 400, "which of them is not known"
    await task


# the subset ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("subset", [["10.0.0.3:8000"], "10.0.0.3:8000 , 10.9.9.9:1"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_only_instances_that_the_gateway_allows_are_chosen(
    start_runtime: StartRuntime, subset: Any, path: str
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(path, subset=subset), prompt())
    await settle()
    assert stream.addresses == [ADDRESSES["c"]]
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:1"], ["10.0.0.1:8000"]])
async def test_a_subset_without_a_ready_instance_is_unavailable(start_runtime: StartRuntime, subset: list[str]) -> None:
    down = instance("a", state=InstanceState.DOWN)
    gateway = Gateway(await start_runtime(instances=(down, *MEMBERS[1:])))
    stream, task = gateway.open(head(subset=subset), prompt())
    await finished(task, gateway)

    (reply,) = stream.replies
    assert reply.immediate_response.status.code == 503
    assert stream.set_fields(reply)["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"


# refusals --------------------------------------------------------------------------------------------------------
async def test_a_full_fleet_answers_429_with_when_to_come_back_and_llmds_reason(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, max_requests=1))
    first, first_task = gateway.open(head(), prompt())
    await settle()
    stream, task = gateway.open(head(x_request_id="r-2"), prompt())
    await settle()

    (reply,) = stream.replies
    fields = stream.set_fields(reply)
    assert reply.immediate_response.status.code == 429
    assert fields["retry-after"] == "1"
    assert fields["x-llm-d-request-dropped-reason"] == "rejected-saturated"
    assert orjson.loads(reply.immediate_response.body)["error"]["code"] == "replica_full"
    await task
    first.end()
    await finished(first_task, gateway)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/completions", {"prompt": "hello", "max_tokens": 5}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}),
    ],
)
async def test_a_limit_that_is_met_is_told_in_header_fields(
    start_runtime: StartRuntime, path: str, sent: dict[str, Any]
) -> None:
    limits = LimitSettings(tokens_per_day=20, tokens_per_minute=1000)
    keys = (TenantKeySettings(name="ci", key=SecretStr("acme-secret")),)
    acme = TenantSettings(name="acme", keys=keys, limits=limits, draws="asked")
    gateway = Gateway(await start_runtime(instances=MEMBERS, tenants=(acme,)))
    asked = {"model": "default", "n": 9, **sent}
    stream, task = gateway.open(head(path, authorization="Bearer acme-secret"), body(asked))
    await finished(task, gateway)

    (reply,) = stream.replies
    fields = stream.set_fields(reply)
    assert reply.immediate_response.status.code == 429
    told = [fields[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining")]
    assert told == ["20", "20"], "the limit that is met, and not the one a minute"
    assert "x-ratelimit-reset-tokens" in fields and fields["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (head(), 404),
        (head("/reset_prefix_cache"), 403),
        (head("//sleep/"), 403),
        (head(content_length="99999999999"), 413),
    ],
)
async def test_what_a_router_refuses_a_picker_refuses(start_runtime: StartRuntime, first: Any, status: int) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(first, prompt(model="nobody"))
    await finished(task, gateway)

    (reply,) = stream.replies
    assert reply.immediate_response.status.code == status


async def test_a_body_that_grows_too_long_is_refused_and_no_longer_counted(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, max_body_bytes=1024))
    stream, task = gateway.open(head(), body(b"x" * 1000, ends=False), body(b"x" * 1000))
    await finished(task, gateway)
    assert stream.replies[0].immediate_response.status.code == 413


@pytest.mark.parametrize("sent", [(), (head(),), (head(), prompt_begins())], ids=["nothing", "its head", "a part"])
async def test_a_request_that_does_not_come_is_waited_for_no_longer_than_clients_have(
    start_runtime: StartRuntime, sent: tuple[Any, ...]
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, client_timeout_s=0.05))
    stream, task = gateway.open(*sent)
    async with asyncio.timeout(30):
        await task

    assert [reply.immediate_response.status.code for reply in stream.replies] == [408]
    assert gateway.leaves_nothing()


async def test_a_request_that_has_come_has_its_whole_time(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, client_timeout_s=0.05, total_timeout_s=0.3))
    stream, task = gateway.open(head(), prompt(stream=True))
    async with asyncio.timeout(30):
        await task

    assert stream.kinds == ["request_headers", "request_body"]
    assert gateway.outcomes == {"timed_out": 1}
    assert gateway.leaves_nothing()


async def test_a_request_without_a_key_is_refused_where_keys_are_set(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS, api_keys=("mine",)))
    for path in (COMPLETIONS, "/version"):
        stream, task = gateway.open(head(path), prompt())
        await finished(task, gateway)
        assert stream.replies[0].immediate_response.status.code == 401


@pytest.mark.parametrize(("path", "method"), [(COMPLETIONS, "POST"), ("/v1/models", "GET")])
async def test_a_request_waits_for_the_key_of_its_token(
    start_runtime: StartRuntime, tmp_path: Path, path: str, method: str
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_bytes(jwks(jwk(RSA_KEY, "one")))
    trusted = JwtSettings(issuer="https://id.example", audience=("fleet",), keys_file=keys)
    runtime = await start_runtime(instances=MEMBERS, tenants=(TenantSettings(name="acme"),), jwt=(trusted,))
    gateway, signed = Gateway(runtime), token(OTHER_RSA_KEY, "two", exp=2e9).decode()
    keys.write_bytes(jwks(jwk(OTHER_RSA_KEY, "two")))

    stream, task = gateway.open(head(path, method=method, authorization=f"Bearer {signed}"), prompt())
    await eventually(lambda: stream.replies)

    if method == "GET":
        assert stream.replies[0].immediate_response.status.code == 200
    else:
        assert only_live(gateway).machine.spec.claim.tenant == "acme"
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/models", "/version", "/v1/responses/resp_1"])
async def test_what_a_browser_sends_ahead_without_a_key_is_answered_and_reaches_no_instance(
    start_runtime: StartRuntime, path: str
) -> None:
    fleet = await start_runtime(
        instances=MEMBERS, api_keys=("mine",), upstream_api_key="of-the-fleet", cors_origins=("https://app",)
    )
    gateway = Gateway(fleet)
    stream, task = gateway.open(head(path, method="OPTIONS", ends=True, origin="https://app"))
    await finished(task, gateway)

    (reply,) = stream.replies
    assert reply.immediate_response.status.code == 204
    fields = stream.set_fields(reply)
    assert "OPTIONS" in fields["allow"]
    assert "authorization" not in fields
    assert ("access-control-allow-origin" in fields) is (path != "/version")
    assert gateway.outcomes == {}


async def test_a_forbidden_path_is_refused_to_a_browser_that_asks_first_too(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head("/sleep", method="OPTIONS", ends=True))
    await finished(task, gateway)

    assert stream.replies[0].immediate_response.status.code == 403


async def test_models_are_answered_without_an_instance(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=()))
    stream, task = gateway.open(head("/v1/models", method="GET", ends=True))
    await finished(task, gateway)
    (reply,) = stream.replies
    assert reply.immediate_response.status.code == 200
    assert [each["id"] for each in orjson.loads(reply.immediate_response.body)["data"]] == ["default"]


async def test_a_tenant_is_told_the_models_that_it_may_use(start_runtime: StartRuntime) -> None:
    acme = TenantSettings(
        name="acme", models=("gpt",), keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),)
    )
    pools = (PoolSettings(model="base", aliases=("gpt",)),)
    gateway = Gateway(await start_runtime(instances=(), tenants=(acme,), pools=pools))
    stream, task = gateway.open(head("/v1/models", method="GET", ends=True, authorization="Bearer acme-secret"))
    await finished(task, gateway)
    (reply,) = stream.replies
    assert [each["id"] for each in orjson.loads(reply.immediate_response.body)["data"]] == ["gpt"]


async def test_a_model_that_a_tenant_may_not_use_is_like_one_that_does_not_exist(start_runtime: StartRuntime) -> None:
    acme = TenantSettings(
        name="acme", models=("gpt",), keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),)
    )
    pools = (PoolSettings(model="base", aliases=("gpt",)),)
    gateway = Gateway(await start_runtime(instances=MEMBERS, tenants=(acme,), pools=pools))
    key = {"authorization": "Bearer acme-secret"}

    async def answered(first: Any, *more: Any) -> Any:
        stream, task = gateway.open(first, *more)
        await finished(task, gateway)
        return stream.replies[0].immediate_response

    def of(path: str) -> Any:
        return head(path, method="GET", ends=True, **key)

    assert orjson.loads((await answered(of("/v1/models/gpt"))).body)["id"] == "gpt"
    for hidden, missing in (
        (await answered(of("/v1/models/base")), await answered(of("/v1/models/none"))),
        (await answered(head(**key), prompt(model="base")), await answered(head(**key), prompt(model="none"))),
    ):
        assert hidden.status.code == missing.status.code == 404
        assert hidden.body.replace(b"base", b"none") == missing.body
        names = [[each.header.key for each in reply.headers.set_headers] for reply in (hidden, missing)]
        assert names[0] == names[1]
        assert hidden.details == missing.details


LLM_D = ("x-llm-d-inference-fairness-id", "x-llm-d-inference-objective")
FORMER = ("x-gateway-inference-fairness-id", "x-gateway-inference-objective")
THE_GATEWAY = "ipv4:10.1.2.3:4711"


class TestARequestWhoseTenantTheGatewayNames:
    @pytest.fixture
    def scheduling(self) -> SchedulingSettings:
        classes = (PriorityClassSettings(name="interactive"), PriorityClassSettings(name="batch"))
        return SchedulingSettings(policy="dualmap-least-cost", queue_order="deadline", block_tokens=16, classes=classes)

    async def gateway(self, start_runtime: StartRuntime, fairness_id: str, objective: str) -> Gateway:
        trusted = GatewaySettings(addresses=("10.1.0.0/16",), tenant_header=fairness_id, class_header=objective)
        acme = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),))
        runtime = await start_runtime(instances=MEMBERS, tenants=(acme,), gateway=trusted)
        return Gateway(runtime, is_gateway=gateway_streams(runtime.context.settings))

    @pytest.mark.parametrize(("fairness_id", "objective"), [LLM_D, FORMER])
    async def test_llmds_fairness_id_is_its_tenant_and_the_objective_its_class(
        self, start_runtime: StartRuntime, fairness_id: str, objective: str
    ) -> None:
        gateway = await self.gateway(start_runtime, fairness_id, objective)
        stream, task = gateway.open(head(**{fairness_id: "acme", objective: "batch"}), prompt(), peer=THE_GATEWAY)
        await settle()
        placed = only_live(gateway).machine.spec

        assert (placed.claim.tenant, placed.claim.class_rank) == ("acme", 1)
        stream.send(answer_head(ends=True))
        await finished(task, gateway)
        assert gateway.outcomes == {"completed": 1}

    async def test_an_objective_that_is_no_class_has_the_class_of_its_tenant(self, start_runtime: StartRuntime) -> None:
        gateway = await self.gateway(start_runtime, *LLM_D)
        fairness_id, objective = LLM_D
        stream, task = gateway.open(head(**{fairness_id: "acme", objective: "sheddable"}), prompt(), peer=THE_GATEWAY)
        await settle()

        assert only_live(gateway).machine.spec.claim.class_rank == 0
        stream.end()
        await finished(task, gateway)

    @pytest.mark.parametrize(
        ("peer", "named", "status"),
        [
            ("ipv4:192.0.2.1:4711", {LLM_D[0]: "acme"}, 403),
            (THE_GATEWAY, {LLM_D[0]: "nobody"}, 403),
            (THE_GATEWAY, {FORMER[0]: "acme"}, 401),
            (THE_GATEWAY, {}, 401),
        ],
        ids=["another client claims it", "unknown tenant", "by another name than was set", "none is named"],
    )
    async def test_no_other_client_is_believed(
        self, start_runtime: StartRuntime, peer: str, named: dict[str, str], status: int
    ) -> None:
        gateway = await self.gateway(start_runtime, *LLM_D)
        stream, task = gateway.open(head(**named), prompt(), peer=peer)
        await finished(task, gateway)

        assert [reply.immediate_response.status.code for reply in stream.replies] == [status]

    async def test_a_key_names_the_tenant_where_the_gateway_names_none(self, start_runtime: StartRuntime) -> None:
        gateway = await self.gateway(start_runtime, *LLM_D)
        stream, task = gateway.open(head(authorization="Bearer acme-secret"), prompt(), peer=THE_GATEWAY)
        await settle()

        assert only_live(gateway).machine.spec.claim.tenant == "acme"
        stream.end()
        await finished(task, gateway)


class TestATurnOfARun:
    @pytest.fixture
    def scheduling(self) -> SchedulingSettings:
        return SchedulingSettings(policy="dualmap-least-cost", block_tokens=16, admit_runs=True)

    async def test_its_instance_gets_the_hash_of_the_run_in_place_of_the_name_that_the_client_sent(
        self, start_runtime: StartRuntime
    ) -> None:
        gateway = Gateway(await start_runtime(instances=MEMBERS))
        stream, task = gateway.open(head(**{"x-session-id": "my project"}), prompt())
        await settle()

        assert stream.set_fields(stream.replies[0])["x-session-id"] == hashed_name("", "my project").run
        stream.end()
        await finished(task, gateway)
        unnamed, task = gateway.open(head(), prompt())
        await settle()
        assert "x-session-id" not in unnamed.set_fields(unnamed.replies[0])
        unnamed.end()
        await finished(task, gateway)


# the answer ------------------------------------------------------------------------------------------------------
async def test_a_stream_that_does_not_come_here_is_presumed_to_begin_and_ends_with_its_stream(
    start_runtime: StartRuntime, clock: ManualClock
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM, served=stream.addresses[0]))
    await settle()

    live = only_live(gateway)
    assert live.machine.phase is Phase.PREFILLING, "the head comes before the first token"
    fields = stream.set_fields(stream.replies[-1])
    assert fields["x-dualmap-instance"] == live.machine.instance_id
    assert fields["x-request-id"] == "r-1"
    await clock.advance(60.0)
    assert live.machine.phase is Phase.PRESUMED

    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {"ended": 1}


async def test_an_answer_that_does_not_stream_is_whole_with_its_head(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt())
    await settle()
    stream.send(answer_head(fields={"content-type": "application/json"}))
    await settle()
    assert only_live(gateway).machine.phase is Phase.ANSWERING
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {"completed": 1}


async def test_trailers_end_an_answer_whole(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM), trailers("response_trailers"))
    await finished(task, gateway)
    assert stream.kinds[-1] == "response_trailers"
    assert gateway.outcomes == {"completed": 1}


_EVENTS = (
    b'data: {"choices":[{"text":"one"}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n',
)


async def test_a_stream_that_comes_here_shows_its_first_token_and_its_usage_and_passes_unchanged(
    start_runtime: StartRuntime,
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(modes=(DUPLEX, DUPLEX)), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM))
    await settle()
    live = only_live(gateway)
    assert live.machine.first_token_s is None

    stream.send(answer_body(_EVENTS[0]))
    await settle()
    assert live.machine.phase is Phase.ANSWERING
    stream.send(answer_body(_EVENTS[1]), answer_body(b"", ends=True))
    await finished(task, gateway)

    pieces = [
        reply.response_body.response.body_mutation.streamed_response
        for reply in stream.replies
        if reply.WhichOneof("response") == "response_body"
    ]
    assert b"".join(piece.body for piece in pieces) == b"".join(_EVENTS)
    assert [piece.end_of_stream for piece in pieces] == [False, False, True]
    usage = live.machine.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (9, 4, 2)
    assert gateway.outcomes == {"completed": 1}


async def test_the_bodies_of_some_streams_are_asked_for_so_that_their_first_tokens_are_seen(
    start_runtime: StartRuntime,
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS), observed_share=0.5)
    asked = []
    for number in range(4):
        modes = (BodyMode.BUFFERED, NO_MODE)
        stream, task = gateway.open(head(modes=modes, x_request_id=f"r-{number}"), prompt(stream=True))
        await settle()
        stream.send(answer_head(fields=STREAM))
        await settle()
        mode = stream.replies[-1].mode_override
        asked.append(mode.response_body_mode == BodyMode.STREAMED)
        live = only_live(gateway)
        if asked[-1]:
            assert live.machine.phase is Phase.PREFILLING
            stream.send(answer_body(_EVENTS[0]))
            await settle()
            assert live.machine.phase is Phase.ANSWERING
            stream.send(answer_body(_EVENTS[1], ends=True))
        stream.end()
        await finished(task, gateway)
    assert asked == [False, True, False, True]
    assert gateway.outcomes == {"ended": 2, "completed": 2}


@pytest.fixture
async def reporting(start_runtime: StartRuntime) -> AsyncIterator[Gateway]:
    """A picker to which first tokens can be reported."""
    gateway = Gateway(await start_runtime(instances=MEMBERS), observed_share=1.0)
    await gateway.picker.first_tokens.start("127.0.0.1", 0, "127.0.0.1")
    yield gateway
    gateway.picker.first_tokens.close()


REPORTS = {"x_dualmap_reports_first_token": "true"}


async def test_a_gateway_that_reports_first_tokens_is_told_where_and_is_asked_for_no_body(reporting: Gateway) -> None:
    gateway = reporting
    first = head(modes=(BodyMode.BUFFERED, NO_MODE), **REPORTS)
    stream, task = gateway.open(first, prompt(stream=True))
    await settle()
    choice = stream.choice.request_body.response.header_mutation
    assert "x-dualmap-reports-first-token" in choice.remove_headers
    stream.send(answer_head(fields=STREAM))
    await settle()
    reply, live = stream.replies[-1], only_live(gateway)
    assert not reply.HasField("mode_override")
    place = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields["x-dualmap-first-token"].string_value
    assert live.machine.phase is Phase.PREFILLING

    address, _, key = place.partition("/")
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(f"POST /{key} HTTP/1.1\r\nhost: {address}\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    writer.close()

    assert live.machine.phase is Phase.ANSWERING
    assert live.machine.first_token_s is not None
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {"ended": 1}


async def test_a_gateway_that_never_reports_what_it_said_it_would_is_soon_not_believed(
    reporting: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = reporting
    told, asked = 0, 0
    for number in range(UNANSWERED + 3):
        first = head(modes=(BodyMode.BUFFERED, NO_MODE), x_request_id=f"r-{number}", **REPORTS)
        stream, task = gateway.open(first, prompt(stream=True), answer_head(fields=STREAM))
        await settle()
        told += "envoy.lb" in stream.replies[-1].dynamic_metadata.fields
        asked += stream.replies[-1].HasField("mode_override")
        stream.end()
        await finished(task, gateway)
    assert (told, asked) == (UNANSWERED, 3)
    assert "picker.first_token_port" in caplog.text
    assert len(gateway.picker.first_tokens) == 0


@pytest.mark.parametrize(
    "answer", [answer_head(), answer_head(500, fields=STREAM), answer_head(fields=STREAM, ends=True)]
)
async def test_no_first_token_is_awaited_of_what_is_no_stream(reporting: Gateway, answer: Any) -> None:
    gateway = reporting
    first = head(modes=(BodyMode.BUFFERED, NO_MODE), **REPORTS)
    stream, task = gateway.open(first, prompt(stream=True), answer)
    await settle()
    assert "envoy.lb" not in stream.replies[-1].dynamic_metadata.fields
    assert len(gateway.picker.first_tokens) == 0
    stream.end()
    await finished(task, gateway)


@pytest.mark.parametrize("modes", [(DUPLEX, NO_MODE), (BodyMode.BUFFERED, BodyMode.BUFFERED)])
async def test_no_body_is_asked_for_where_envoy_would_not_listen(
    start_runtime: StartRuntime, modes: tuple[BodyMode, BodyMode]
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS), observed_share=1.0)
    stream, task = gateway.open(head(modes=modes), prompt(stream=True), answer_head(fields=STREAM))
    await settle()
    assert not stream.replies[-1].HasField("mode_override")
    stream.end()
    await finished(task, gateway)


async def test_a_gateway_that_sends_no_body_is_soon_not_asked_any_more(
    start_runtime: StartRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS), observed_share=1.0)
    asked = 0
    for number in range(UNANSWERED + 3):
        first = head(modes=(BodyMode.BUFFERED, NO_MODE), x_request_id=f"r-{number}")
        stream, task = gateway.open(first, prompt(stream=True), answer_head(fields=STREAM))
        await settle()
        asked += stream.replies[-1].HasField("mode_override")
        stream.end()
        await finished(task, gateway)
    assert asked == UNANSWERED
    assert "allow_mode_override" in caplog.text


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (b"", "upstream_failed"),  # its end is missing
        (b'data: {"error":{"message":"no","code":500}}\n\n', "upstream_failed"),
        (b'data: {"error":{"message":"no","code":400}}\n\n', "client_error"),
    ],
)
async def test_a_stream_that_comes_here_is_judged_by_its_end(
    start_runtime: StartRuntime, last: bytes, outcome: str
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(modes=(DUPLEX, DUPLEX)), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM), answer_body(_EVENTS[0]), answer_body(last, ends=True))
    await finished(task, gateway)
    assert gateway.outcomes == {outcome: 1}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (answer_head(400), "client_error"),
        (answer_head(404), "client_error"),
        (answer_head(500), "upstream_failed"),
        (answer_head(503, details="upstream_reset_before_response_started{connection_failure}"), "upstream_failed"),
        (answer_head(503, details="upstream_reset_before_response_started{overflow}"), "refused"),
        (answer_head(504, details="upstream_response_timeout"), "timed_out"),
        (answer_head(429, details="local_rate_limited"), "refused"),
    ],
)
async def test_an_error_ends_a_request_by_whose_fault_it_is(
    start_runtime: StartRuntime, answer: Any, outcome: str
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt(stream=True), answer)
    await settle()
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {outcome: 1}


EARLY = "upstream_reset_before_response_started"


@pytest.mark.parametrize(
    ("details", "blamed"),
    [
        ("via_upstream", True),
        (f"{EARLY}{{remote_connection_failure|delayed_connect_error:_Connection_refused}}", True),
        (f"{EARLY}{{connection_timeout}}", True),
        (f"{EARLY}{{connection_termination}}", True),
        (f"{EARLY}{{remote_reset|overflow}}", True),
        ("response_timeout", True),
        ("upstream_per_try_timeout", True),
        ("no_healthy_upstream", False),
        (f"{EARLY}{{overflow}}", False),
        (f"{EARLY}{{local_connection_failure|connection_timeout}}", False),
        (f"{EARLY}{{local_refused_stream_reset}}", False),
        (f"{EARLY}{{overload_manager_reset}}", False),
        ("request_header_timeout", False),
        ("max_duration_timeout", False),
        ("a_filter_of_ones_own{connection_failure,_upstream_response_timeout}", False),
    ],
)
async def test_an_instance_is_blamed_for_what_it_was_sent_and_for_nothing_of_the_gateways_own(
    start_runtime: StartRuntime, details: str, blamed: bool
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    breakers = gateway.runtime.pools.pools["default"].evidence.breakers
    stream, task = gateway.open(head(), prompt(stream=True), answer_head(503, details=details))
    await settle()
    stream.end()
    await finished(task, gateway)
    assert bool(breakers._kept) is blamed


@pytest.mark.parametrize(
    ("details", "flags", "named"),
    [
        (f"{EARLY}{{overflow}}", 1 << 7, "max_connections"),
        (f"{EARLY}{{remote_connection_failure}}", 1 << 5 | 1 << 7, "max_retries"),
    ],
)
async def test_a_limit_of_the_gateways_own_is_named_in_the_log_now_and_then(
    start_runtime: StartRuntime, caplog: pytest.LogCaptureFixture, details: str, flags: int, named: str
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    for number in range(3):
        first = head(x_request_id=f"r-{number}")
        stream, task = gateway.open(first, prompt(stream=True), answer_head(503, details=details, flags=flags))
        await settle()
        stream.end()
        await finished(task, gateway)
    (said,) = [record.getMessage() for record in caplog.records if "circuit_breakers" in record.getMessage()]
    assert named in said


@pytest.mark.parametrize("how", ["attributes", "metadata"])
async def test_a_request_that_the_gateway_sent_to_its_second_choice_is_booked_there(
    start_runtime: StartRuntime, how: str
) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt(stream=True))
    await settle()
    live = only_live(gateway)
    first, (_, second) = live.machine.instance_id, stream.addresses
    said = {"by_metadata": second} if how == "metadata" else {"served": second}

    stream.send(answer_head(fields=STREAM, **said))
    await settle()

    moved_to = next(name for name, address in ADDRESSES.items() if address == second)
    assert live.machine.instance_id == moved_to != first
    loads = (await live.pool.store.snapshot()).loads
    assert {name: load.running_requests for name, load in loads.items() if load.running_requests} == {moved_to: 1}
    fields = stream.set_fields(stream.replies[-1])
    assert (fields["x-dualmap-instance"], fields["x-dualmap-attempts"]) == (moved_to, "2")
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {"ended": 1}


async def test_a_request_that_the_gateways_fallback_sent_elsewhere_is_booked_there(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(subset=[ADDRESSES["a"]]), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM, served=ADDRESSES["c"]))
    await settle()
    assert only_live(gateway).machine.instance_id == "c"
    stream.end()
    await finished(task, gateway)


# ends ------------------------------------------------------------------------------------------------------------
async def test_a_stream_that_ends_before_its_answer_was_left_by_its_client(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), prompt(stream=True))
    await settle()
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {"client_gone": 1}


@pytest.mark.parametrize(
    ("last", "outcome"), [(_EVENTS[1], "completed"), (_EVENTS[1].partition(b"data: [DONE]")[0], "client_gone")]
)
async def test_a_client_that_leaves_at_the_last_event_has_the_whole_answer(
    start_runtime: StartRuntime, last: bytes, outcome: str
) -> None:
    """As OpenAI's client does: it closes the connection at ``[DONE]``, before the end of the body comes."""
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(modes=(DUPLEX, DUPLEX)), prompt(stream=True))
    await settle()
    stream.send(answer_head(fields=STREAM), answer_body(_EVENTS[0]), answer_body(last))
    await settle()
    live = only_live(gateway)
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {outcome: 1}
    assert live.machine.usage is not None, "it had come by then"


async def test_a_stream_that_ends_in_its_body_leaves_nothing(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    stream, task = gateway.open(head(), body(b"{", ends=False))
    await settle()
    stream.end()
    await finished(task, gateway)
    assert gateway.outcomes == {}


async def test_a_client_that_leaves_while_its_request_is_held_frees_its_place(start_runtime: StartRuntime) -> None:
    tight = tuple(instance(name, max_running_requests=1) for name in "a")
    gateway = Gateway(await start_runtime(instances=tight))
    first, first_task = gateway.open(head(), prompt())
    await settle()
    stream, task = gateway.open(head(x_request_id="r-2"), prompt("another"))
    await settle()
    assert first.replies
    assert not stream.replies, "it is held"

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    first.end()
    await finished(first_task, gateway)
    assert gateway.outcomes == {"client_gone": 2}


async def test_a_held_request_is_answered_once_it_is_granted(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=(instance("a", max_running_requests=1),)))
    first, first_task = gateway.open(head(), prompt())
    await settle()
    stream, task = gateway.open(head(x_request_id="r-2"), prompt("another"))
    await settle()
    assert not stream.replies

    first.end()
    await settle()
    await first_task
    assert stream.addresses == [ADDRESSES["a"]]
    stream.end()
    await finished(task, gateway)


async def test_what_is_cancelled_when_the_time_to_drain_is_over_was_cut_off(start_runtime: StartRuntime) -> None:
    gateway = Gateway(await start_runtime(instances=MEMBERS))
    _, task = gateway.open(head(), prompt(stream=True), answer_head(fields=STREAM))
    await settle()
    gateway.picker.cuts_off = True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gateway.outcomes == {"cut_off": 1}
    assert gateway.leaves_nothing()


# both legs, conformance ------------------------------------------------------------------------------------------
class TestASplitRequest:
    @pytest.fixture
    def scheduling(self) -> SchedulingSettings:
        return SchedulingSettings(policy="dualmap", block_tokens=16, split=SplitSettings(mode="always"))

    async def test_it_goes_to_its_decoder_which_is_told_its_prefiller(self, start_runtime: StartRuntime) -> None:
        roles = (instance("a", role=Role.PREFILL), instance("b", role=Role.DECODE), instance("c", role=Role.DECODE))
        runtime = await start_runtime(instances=roles, pairs_legs=True)
        gateway = Gateway(runtime)
        stream, task = gateway.open(head(), prompt("word " * 2000, stream=True, max_tokens=50))
        await settle()

        assert stream.addresses in ([ADDRESSES["b"]], [ADDRESSES["c"]])
        assert stream.set_fields(stream.choice)["x-prefiller-host-port"] == ADDRESSES["a"]
        stream.send(answer_head(fields=STREAM, served=stream.addresses[0]))
        await settle()
        fields = stream.set_fields(stream.replies[-1])
        assert fields["x-dualmap-prefill-instance"] == "a"
        stream.end()
        await finished(task, gateway)


async def test_conformance_headers_are_obeyed_where_they_are_switched_on(start_runtime: StartRuntime) -> None:
    runtime = await start_runtime(instances=MEMBERS)
    wanted = f"{ADDRESSES['c']}, {ADDRESSES['b']}"
    for switched, text in ((True, "10.0.0.3"), (True, wanted), (False, wanted)):
        gateway = Gateway(runtime, test_headers=switched)
        stream, task = gateway.open(head(test_epp_endpoint_selection=text), prompt())
        await settle()
        if switched and "," in text:
            assert set(stream.addresses) == {ADDRESSES["b"], ADDRESSES["c"]}
        elif switched:
            assert stream.addresses == [ADDRESSES["c"]]
        stream.send(answer_head(served=ADDRESSES["c"]))
        await settle()
        fields = stream.set_fields(stream.replies[-1])
        assert fields.get("x-conformance-test-served-endpoint") == (ADDRESSES["c"] if switched else None)
        stream.end()
        await finished(task, gateway)
