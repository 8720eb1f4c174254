"""A rule for bodies holds for what a server behind the router reads: an app on uvicorn, which reads as vLLM's does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.http.long_bodies import MAX_JSON_VALUES
from dualmap.router.prompts.inference_request import response_id
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import LimitSettings, TenantKeySettings, TenantSettings
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from tests.router import tools
from tests.router.http.kit import CHAT, Answer, Router
from tests.support.served_instance import ServedInstance, served_instance

JSON = "content-type: application/json\r\n"
FORM = "content-type: multipart/form-data; boundary=b\r\n"
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n'
AUDIO = "/v1/audio/transcriptions"
GENERATE = "/inference/v1/generate"
APIS = (CHAT, "/v1/embeddings", "/v1/chat/completions/batch", GENERATE, "/invocations", "/v1/responses")
SECRET = SecretStr("a long secret of the fleet")


def chat(model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **more}


def raw(text: str, **more: Any) -> bytes:
    """A chat body whose last fields are this text."""
    return json.dumps(chat(**more))[:-1].encode() + b"," + text.encode() + b"}"


def field(name: str, value: str) -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def tenant(name: str, **changes: Any) -> TenantSettings:
    return TenantSettings(name=name, keys=(TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret")),), **changes)


TENANTS = (
    tenant("models", models=("m",), shares_cache=True),
    tenant("pools", pools=("default",), shares_cache=True),
    tenant("capped", model_limits={"secret": LimitSettings(requests_per_minute=1)}, shares_cache=True),
    tenant("tokens", limits=LimitSettings(tokens_per_day=1_000_000), shares_cache=True),
    tenant("class", priority_class="batch", shares_cache=True),
    tenant("salted"),
    tenant("requests", limits=LimitSettings(requests_per_day=1_000_000), shares_cache=True),
)
WITH_RIGHTS = [each.name for each in TENANTS if each.name != "requests"]


@pytest.fixture
def instance() -> Iterator[ServedInstance]:
    with served_instance("m", "secret") as served:
        yield served


@pytest.fixture
def scheduling(request: pytest.FixtureRequest) -> SchedulingSettings:
    """A parameter of False: engines are told no priorities."""
    classes = (PriorityClassSettings(name="default"), PriorityClassSettings(name="batch", engine_priority=10))
    return SchedulingSettings(
        policy="dualmap-least-cost",
        queue_order="deadline",
        classes=classes,
        engine_priorities=getattr(request, "param", True),
    )


@pytest.fixture
async def router(start_runtime: Any, start_router: Any, instance: ServedInstance) -> Router:
    pool = PoolSettings(model="m", aliases=("alias",), loras=("secret",))
    runtime = await start_runtime(
        instances=(tools.spec("one", url=instance.url),), pools=(pool,), tenants=TENANTS, api_keys=("key-of-no-tenant",)
    )
    started: Router = await start_router(runtime.intake, tenants=runtime.tenants, tenant_cache_secret=SECRET)
    return started


async def send(
    router: Router, body: Any, path: str = CHAT, *, key: str, headers: str = JSON, method: str = "POST"
) -> Answer:
    client = await router.connect()
    client.request(path, body, headers=f"authorization: Bearer {key}\r\n{headers}", method=method)
    try:
        return await client.answer()
    finally:
        client.close()


UNREAD: dict[str, tuple[bytes, str]] = {
    "UTF-16": (json.dumps(chat("secret")).encode("utf-16"), JSON),
    "UTF-32": (json.dumps(chat("secret")).encode("utf-32-be"), JSON),
    "an encoding that no server undoes": (orjson.dumps(chat("secret")), JSON + "content-encoding: gzip\r\n"),
    "a second encoding": (
        orjson.dumps(chat("secret")), JSON + "content-encoding: identity\r\ncontent-encoding: br\r\n",
    ),
    "a model behind many values": (
        raw('"a":[' + '"",' * (MAX_JSON_VALUES + 1) + '0],"model":"secret"'), JSON,
    ),
    "a long body in UTF-16": (json.dumps(chat("secret", a="x" * 70_000)).encode("utf-16-le"), JSON),
    "a second content type": (orjson.dumps(chat("secret")), JSON + "content-type: text/plain\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("shape", sorted(UNREAD))
async def test_a_body_that_is_not_read_as_the_engine_reads_it_is_refused_where_rights_depend_on_it(
    router: Router, instance: ServedInstance, shape: str
) -> None:
    body, headers = UNREAD[shape]

    for name in WITH_RIGHTS:
        answer = await send(router, body, key=f"{name}-secret", headers=headers)

        assert answer.status == (415 if "encoding" in shape else 400)
        assert name in answer.error["message"] and "UTF-8" in answer.error["message"]
    assert instance.reads == []


@pytest.mark.parametrize("scheduling", [False], indirect=True)
@pytest.mark.parametrize("shape", sorted(UNREAD))
async def test_it_is_passed_on_as_it_came_for_callers_whose_rights_do_not_depend_on_it(
    router: Router, instance: ServedInstance, shape: str
) -> None:
    body, headers = UNREAD[shape]

    for number, key in enumerate(("requests-secret", "key-of-no-tenant"), 1):
        await send(router, body, key=key, headers=headers)

        assert len(instance.reads) == number
        assert instance.last.model == "secret"
        assert instance.last.body == body or "content type" in shape, "that one is read, and gets a priority"


async def test_no_body_that_is_not_read_brings_a_clients_priority_to_an_engine_that_is_told_those_of_classes(
    router: Router, instance: ServedInstance
) -> None:
    body = json.dumps(chat(priority=-100)).encode("utf-16")

    for path in (*APIS, "/tokenize", "/v1/unknown"):
        refused = await send(router, body, path, key="requests-secret")
        assert (refused.status == 400 and "class" in refused.error["message"]) or path == "/v1/responses"
    assert instance.reads == []


@pytest.mark.parametrize("scheduling", [False], indirect=True)
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/", "/v1/responses/render"])
@pytest.mark.parametrize("field", ["previous_response_id", "request_id"])
@pytest.mark.parametrize("key", ["requests-secret", "key-of-no-tenant"])
async def test_no_body_reaches_a_stored_response_of_another_tenant(
    router: Router, instance: ServedInstance, key: str, field: str, path: str
) -> None:
    body = {"model": "m", "input": "what did I say?", field: response_id("r", "one", "tokens")}

    assert (await send(router, body, path, key=key)).status == 404
    for encoding in ("utf-16", "utf-32"):
        refused = await send(router, json.dumps(body).encode(encoding), path, key=key)
        assert refused.status == 400 and "stored responses" in refused.error["message"]
    many = json.dumps({"a": [""] * (MAX_JSON_VALUES + 1), **body}).encode()
    assert (await send(router, many, path, key=key)).status == 400
    assert (await send(router, body, path, key=key, headers=JSON + "content-encoding: x\r\n")).status == 415
    assert instance.reads == []


async def test_without_tenants_a_response_whose_body_is_not_read_is_passed_on(
    start_runtime: Any, start_router: Any, instance: ServedInstance
) -> None:
    runtime = await start_runtime(instances=(tools.spec("one", url=instance.url),), pools=(PoolSettings(model="m"),))
    router = await start_router(runtime.intake)

    assert (await send(router, json.dumps(chat(input="hi")).encode("utf-16"), "/v1/responses", key="")).status == 200


@pytest.mark.parametrize("padding", ["", "x" * 70_000])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("models", '"model":"secret"'),
        ("models", '"model":"m"'),
        ("models", '"\\u006dodel":"secret"'),
        ("capped", '"model":"secret"'),
        ("pools", '"model":"secret"'),
        ("tokens", '"max_tokens":9'),
        ("class", '"priority":-5,"priority":3'),
        ("salted", '"cache_salt":"a","cache_salt":"b"'),
    ],
)
async def test_a_doubled_field_is_refused_where_a_right_depends_on_it(
    router: Router, instance: ServedInstance, name: str, text: str, padding: str
) -> None:
    body = raw(text, padding=padding)

    refused = await send(router, body, key=f"{name}-secret")

    assert refused.status == 400 and "more than once" in refused.error["message"]
    assert instance.reads == []
    assert (await send(router, body, key="requests-secret")).status == 200
    assert len(instance.reads) == 1


MODEL, OTHER = field("model", "m"), field("model", "secret")
FORMS = {
    "twice": form(MODEL, FILE, OTHER),
    "twice, the other first": form(OTHER, MODEL, FILE),
    "with blanks around its sign": form(FILE, OTHER.replace(b"name=", b"name =")),
    "in an extended parameter": form(FILE, OTHER.replace(b'name="model"', b"name*=utf-8''model")),
    "behind the end": form(FILE, MODEL) + OTHER + b"--b--\r\n",
}


@pytest.mark.parametrize("name", ["models", "capped"])
@pytest.mark.parametrize("shape", sorted(FORMS))
async def test_a_form_that_names_its_model_oddly_is_refused_where_rights_depend_on_it(
    router: Router, instance: ServedInstance, shape: str, name: str
) -> None:
    answer = await send(router, FORMS[shape], AUDIO, key=f"{name}-secret", headers=FORM)

    assert answer.status == 400
    assert instance.reads == []


async def test_a_form_is_read_whole_wherever_its_model_stands(router: Router, instance: ServedInstance) -> None:
    sound = FILE.replace(b"RIFF", b"RIFF" * 40_000)
    for parts in ((OTHER, sound, sound), (sound, OTHER, sound), (sound, sound, OTHER)):
        body = form(*parts)
        assert (await send(router, body, AUDIO, key="models-secret", headers=FORM)).status == 404
        renamed = body.replace(b"secret", b"alias")
        assert (await send(router, renamed, AUDIO, key="requests-secret", headers=FORM)).status == 200
        assert instance.last.model == "m"
    assert len(instance.reads) == 3


async def test_of_a_model_that_a_form_has_twice_the_last_counts_for_both(
    router: Router, instance: ServedInstance
) -> None:
    body = form(OTHER, FILE, field("model", "alias"))

    assert (await send(router, body, AUDIO, key="requests-secret", headers=FORM)).status == 200

    assert instance.last.model == "m"


async def test_a_request_without_a_body_needs_no_reading(router: Router, instance: ServedInstance) -> None:
    for name in WITH_RIGHTS:
        await send(router, b"", "/v2/files", key=f"{name}-secret", method="GET", headers="")
    assert (await send(router, {"anything": 1}, "/v2/unknown", key="models-secret")).status == 404


# what clients must not say ---------------------------------------------------------------------------------------
PARAMS = {"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_port": 1, "kv_load_tiers": []}
STEERING = {
    "kv_transfer_params": PARAMS,
    "ec_transfer_params": PARAMS,
    "vllm_xargs": {"kv_cache_report_mode": "full", "kv_transfer_params": PARAMS, "mine": 1},
}


@pytest.mark.parametrize("padding", ["", "x" * 70_000])
@pytest.mark.parametrize("key", ["key-of-no-tenant", "models-secret"])
async def test_no_client_steers_an_engine_by_its_body(
    router: Router, instance: ServedInstance, key: str, padding: str
) -> None:
    body = chat("alias" if key.startswith("key") else "m", prompt="hi", input="hi", padding=padding, **STEERING)
    doubled = orjson.dumps(body)[:-1] + b',"kv_transfer_params":{"remote_host":"10.6.6.6"}}'

    for path, sent in itertools.product((*APIS, "/v1/completions", "/v1/messages", "/tokenize"), (body, doubled)):
        assert (await send(router, sent, path, key=key)).status == 200
        fields = instance.last.fields
        assert (fields["kv_transfer_params"], fields["ec_transfer_params"]) == (None, None)
        assert fields["vllm_xargs"] == {"mine": 1}
        assert fields["model"] == "m" and fields["padding"] == padding


async def test_no_client_steers_an_engine_by_sampling_params_or_by_a_form(
    router: Router, instance: ServedInstance
) -> None:
    xargs = STEERING["vllm_xargs"]
    body = {"model": "m", "token_ids": [1], "sampling_params": {"max_tokens": 1, "extra_args": STEERING}}
    assert (await send(router, body, GENERATE, key="key-of-no-tenant")).status == 200
    assert instance.last.fields["sampling_params"] == {
        "max_tokens": 1,
        "extra_args": {"vllm_xargs": xargs},
    }

    sent = form(
        field("model", "alias"),
        field("vllm_xargs", json.dumps(xargs)),
        FILE,
        field("kv_transfer_params", "{}x"),
        field("user", "u"),
    )
    assert (await send(router, sent, AUDIO, key="key-of-no-tenant", headers=FORM)).status == 200
    assert instance.last.fields == {"model": "m", "user": "u"}


@pytest.mark.parametrize(
    "body",
    [
        json.dumps(chat(**STEERING)).encode("utf-16"),
        raw('"a":[' + '"",' * (MAX_JSON_VALUES + 1) + '0],"kv\\u005ftransfer_params":{"a":1}'),
        raw('"vllm_xargs":{"kv_cache_report_mode":"full"},"a":[' + f'"{"x" * 999}",' * 1100 + "NaN]"),
    ],
    ids=["UTF-16", "many values", "no strict JSON"],
)
async def test_a_body_that_cannot_be_read_and_may_steer_an_engine_is_refused(
    router: Router, instance: ServedInstance, body: bytes
) -> None:
    answer = await send(router, body, key="key-of-no-tenant")

    assert answer.status == 400 and "transferred" in answer.error["message"]
    assert instance.reads == []


HOPS = ("x-prefiller-host-port", "x-prefiller-url", "x_prefiller_host_port", "x-encoder-hosts-ports",
        "x-kv-cache-source-host-port", "x-data-parallel-host-port", "x-gateway-destination-endpoint")  # fmt: skip


async def test_no_client_steers_a_sidecar_by_its_headers(router: Router, instance: ServedInstance) -> None:
    fields = "".join(f"{name}: 10.6.6.6:80\r\n" for name in HOPS)

    assert (await send(router, chat(), key="key-of-no-tenant", headers=JSON + fields + "x-mine: 1\r\n")).status == 200

    assert instance.last.headers["x-mine"] == "1"
    assert not set(HOPS) & set(instance.last.headers)


async def test_a_setting_trusts_clients_with_transfers_and_never_with_reports(
    start_runtime: Any, start_router: Any, instance: ServedInstance
) -> None:
    runtime = await start_runtime(
        instances=(tools.spec("one", url=instance.url),), pools=(PoolSettings(model="m"),), trust_transfers=True
    )
    router = await start_router(runtime.intake, trust_transfers=True)
    fields = "".join(f"{name}: 10.6.6.6:80\r\n" for name in HOPS)

    assert (await send(router, chat(**STEERING), key="", headers=JSON + fields)).status == 200

    read = instance.last
    assert read.fields["kv_transfer_params"] == read.fields["ec_transfer_params"] == PARAMS
    assert read.fields["vllm_xargs"] == {"kv_transfer_params": PARAMS, "mine": 1}
    assert set(HOPS) <= set(read.headers)


# what the fleet sets -------------------------------------------------------------------------------------------
PRIORITY_BODIES: dict[str, Callable[[], dict[str, Any]]] = {
    "scheduled": lambda: chat(priority=-100),
    "without a prompt": lambda: {"model": "m", "messages": [], "priority": -100},
    "any number": lambda: chat(priority=-100.0),
}


@pytest.mark.parametrize("kind", sorted(PRIORITY_BODIES))
async def test_the_engine_goes_by_the_class_and_by_no_clients_priority_on_any_path(
    router: Router, instance: ServedInstance, kind: str
) -> None:
    body = {"input": "hi", **PRIORITY_BODIES[kind]()}
    doubled = orjson.dumps(body)[:-1] + b',"priority":-7}'

    for path in (*APIS, "/v1/messages", "/generative_scoring", "/tokenize"):
        for sent in (body, doubled):
            assert (await send(router, sent, path, key="requests-secret")).status == 200
            assert instance.last.fields["priority"] == 0
        assert (await send(router, body, path, key="class-secret")).status == 200
        assert instance.last.fields["priority"] == 10


async def test_a_forms_priority_is_that_of_the_class(router: Router, instance: ServedInstance) -> None:
    sent = form(field("priority", "-100"), FILE, field("model", "alias"))

    assert (await send(router, sent, AUDIO, key="class-secret", headers=FORM)).status == 200

    assert instance.last.fields == {"model": "m", "priority": "10"}


async def test_a_salt_is_what_the_engine_reads_whatever_stands_before_it(
    router: Router, instance: ServedInstance
) -> None:
    for path in APIS:
        sent = orjson.dumps(chat("alias", input="hi", cache_salt="x", priority=3, **STEERING))
        assert (await send(router, sent, path, key="salted-secret")).status == 200
        fields = instance.last.fields
        assert fields["cache_salt"] not in ("x", None) and fields["model"] == "m" and fields["priority"] == 0
        assert fields["kv_transfer_params"] is None


async def test_ids_are_asked_for_also_where_a_typed_client_writes_null(
    start_runtime: Any, start_router: Any, instance: ServedInstance
) -> None:
    runtime = await start_runtime(instances=(tools.spec("one", url=instance.url),), pools=(PoolSettings(model="m"),))
    router = await start_router(runtime.intake, continue_streams="tokens")

    answer = await send(router, chat(stream=True, return_token_ids=None), key="")

    assert b"[DONE]" in answer.body and instance.last.fields["return_token_ids"] is True


# paths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    ["/v1%2Fchat/completions", "/v1%2fchat%2Fcompletions", "//v1//chat/completions", "/v1/./chat/completions",
     "/v1/x/../chat/completions", "/v1/%2e/chat/completions", "/v1/x/%2E%2e/chat/completions",
     "/v1/chat/completions%2F", "/v1/chat/completions/", "/v1/chat/completions#x", "/v1/chat/completions#?x",
     "/%761/chat/completions"],
)  # fmt: skip
async def test_however_a_path_is_written_the_rules_for_it_hold_and_it_is_sent_on_as_judged(
    router: Router, instance: ServedInstance, path: str
) -> None:
    assert (await send(router, chat("secret"), path, key="models-secret")).status == 404
    assert instance.reads == []
    assert (await send(router, chat(), path, key="salted-secret")).status == 200
    assert instance.last.raw_path == CHAT and instance.last.fields["cache_salt"] and instance.last.query == ""


@pytest.mark.parametrize(
    "path",
    ["/v1%252Fchat/completions", "/v1%5Cchat/completions", "/v1\\chat/completions",
     "/v1/responses/..%2Fchat%2Fcompletions", "/v1/responses/x%2F..%2F..%2Fsleep", "/%%32%46sleep",
     "/v1/files/%2e%2e%2Fchat", "/v1%c0%afchat/completions", "/v1/models/a%252Fb", "/v1/chat%00/completions"],
)  # fmt: skip
async def test_a_path_that_servers_read_differently_is_refused(
    router: Router, instance: ServedInstance, path: str
) -> None:
    client = await router.connect()
    client.request(path, chat(), headers=JSON + "authorization: Bearer models-secret\r\n")
    answer = await client.answer()
    assert answer.status == 400 and "servers read differently" in answer.error["message"]
    client.request(CHAT, chat(), headers=JSON + "authorization: Bearer models-secret\r\n")
    assert (await client.answer()).status == 200, "its connection goes on"
    assert [read.raw_path for read in instance.reads] == [CHAT]


@pytest.mark.parametrize(
    "path",
    ["/inference%2Fv1/abort_requests", "/inference/v1/./abort_requests", "/v1%2Fload_lora_adapter", "/x/..%2fsleep"],
)
async def test_no_spelling_leads_a_path_of_the_router_to_an_instance(
    router: Router, instance: ServedInstance, path: str
) -> None:
    assert "app" in (await send(router, {}, path, key="models-secret")).json()
    assert instance.reads == []


async def test_a_stored_response_is_its_tenants_however_its_path_is_written(
    router: Router, instance: ServedInstance
) -> None:
    others, own = response_id("r", "one", "tokens"), response_id("r", "one", "models")
    for spelling in (others, others.replace("@", "%40"), others.replace("~", "%7E")):
        for folder in ("/v1/responses/", "/v1%2fresponses/", "/v1%2fresponses%2F", "/v1/x/../responses/"):
            answer = await send(router, b"", folder + spelling, key="models-secret", method="GET", headers="")
            assert answer.status == 404
    assert instance.reads == []
    assert (await send(router, b"", "/v1%2Fresponses/" + own.replace("@", "%40"), key="models-secret", method="GET",
                       headers="")).status == 200  # fmt: skip
    assert instance.last.path == "/v1/responses/" + own


async def test_a_pattern_for_all_paths_forbids_no_tenant_its_own_stored_response(
    start_runtime: Any, start_router: Any, instance: ServedInstance
) -> None:
    pool = PoolSettings(model="m")
    runtime = await start_runtime(instances=(tools.spec("one", url=instance.url),), pools=(pool,), tenants=TENANTS)
    router = await start_router(runtime.intake, tenants=runtime.tenants, forbidden_paths=("/*", "/v1/audio/*"))
    own = "/v1/responses/" + response_id("r", "one", "models")

    async def status(path: str, method: str = "POST") -> int:
        return (
            await send(router, chat() if method == "POST" else b"", path, key="models-secret", method=method)
        ).status

    assert await status(own, "GET") == await status(own + "/cancel") == await status(CHAT) == 200
    assert await status("/v2/unknown") == await status("/v2/files/x", "GET") == await status(AUDIO) == 403
