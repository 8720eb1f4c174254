"""Edits of a body: the model's name, found wherever it is, and added fields; no other byte changes."""

from __future__ import annotations

import itertools
from typing import Any

import orjson
import pytest
from pydantic import SecretStr

from dualmap.router.http.admission import read_at_once
from dualmap.router.http.body_edits import added_fields, edited, field_edit, json_model_span, priority_field
from dualmap.router.http.forward import body_for
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.machine import RequestSpec
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.tier_load import Source
from tests.router import tools
from tests.router.http.kit import Machine


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"{}"}',
        b'{ "a": 1e400, "b": 18446744073709551616,\r\n"model"\t:\n "{}" , "c": "\\ud83d" }',
        b'{"model":"x","model":7,"tools":[{"model":"alias"}],"model":"{}","metadata":{"model":"alias"}}',
        b'{"metadata":{"model":"alias"},"m\\u006f\\u0064\\u0065\\u006C":"{}"}',
        b'{"messages":[{"content":"\\"model\\":\\"alias\\""},{"content":"\\\\"}],"a\\"model":"alias","model":"{}"}',
        b'{"a":"model","b":["model","alias"],"model":"{}"}',
    ],
)
@pytest.mark.parametrize("name", ["alias", "model", "0", 'a"\\b', "a,b:{c}"])
def test_only_the_objects_own_model_is_replaced(body: bytes, name: str) -> None:
    sent = body.replace(b"{}", orjson.dumps(name)[1:-1])
    assert b"".join(edited(sent, [(json_model_span(sent), b'"real"')])) == body.replace(b'"{}"', b'"real"')


def test_edits_leave_every_other_byte() -> None:
    assert b"".join(edited(b"abcdef", [((1, 1), b"-"), ((3, 5), b"+")])) == b"a-bc+f"
    assert edited(b"abc", []) == [b"abc"]


def read(body: dict[str, Any], *fields: tuple[bytes, bytes]) -> InferenceRequest:
    request = ClientRequest(
        "POST", "/v1/completions", b"", [*fields], http_10=False, keep_alive=True, body=orjson.dumps(body)
    )
    found = read_at_once(request, "id")
    assert found is not None
    return found


def test_what_a_request_says_of_its_priority_is_read() -> None:
    found = read({"prompt": "hi", "service_tier": "flex", "priority": 3}, (b"x-dualmap-priority", b" batch "))
    assert (found.asked_class, found.service_tier, found.sent_priority) == ("batch", "flex", 3)


@pytest.mark.parametrize("body", [{}, {"service_tier": 7, "priority": True}, {"priority": "high"}, {"priority": 1.5}])
def test_what_cannot_be_a_priority_counts_as_not_said(body: dict[str, Any]) -> None:
    found = read({"prompt": "hi", **body})
    assert (found.asked_class, found.service_tier, found.sent_priority) == (None, None, None)


@pytest.mark.parametrize("body", [b"{}", b" { \n} ", b'{"priority": 5, "prompt": "a }"} \n', b'{"prompt":""}'])
def test_an_added_field_is_the_last_word_of_the_body(body: bytes) -> None:
    made = orjson.loads(b"".join(edited(body, [field_edit(body, priority_field(-7))])))
    assert made == {**orjson.loads(body), "priority": -7}


@pytest.mark.parametrize("body", [b"{}", b'{"cache_salt": "own"} \n'])
def test_several_added_fields_are_separated(body: bytes) -> None:
    request = read({"prompt": "hi"})
    request.cache_salt, request.engine_priority = "acme's", -7
    made = orjson.loads(b"".join(edited(body, [field_edit(body, *added_fields(request))])))
    assert made == {"cache_salt": "acme's", "priority": -7}


LOADS = {"max_load_tokens": 9, "remote_host": "10.0.0.1"}


@pytest.mark.parametrize(
    ("path", "most", "trusts", "own", "sent"),
    [
        ("/v1/completions", 0, False, None, {"max_load_tokens": 0}),
        ("/v1/completions", 4096, False, LOADS, {"max_load_tokens": 4096}),
        ("/v1/completions", 0, True, LOADS, LOADS),
        ("/v1/completions", 0, True, None, {"max_load_tokens": 0}),
        ("/v1/completions", None, False, LOADS, None),
        ("/v1/embeddings", 0, False, None, None),
    ],
)
def test_a_request_says_what_its_instance_may_load_unless_a_trusted_client_does(
    path: str, most: int | None, trusts: bool, own: dict[str, Any] | None, sent: dict[str, Any] | None
) -> None:
    body = orjson.dumps({"model": "m", "prompt": "hi", "input": "hi", "kv_transfer_params": own})
    request = ClientRequest("POST", path, b"", [], http_10=False, keep_alive=True, body=body)
    found = read_at_once(request, "id", trusts)
    assert found is not None
    machine = Machine("id", RequestSpec(0, None, 5.0, "m"), ["http://a:1"], max_load_tokens=most)

    made = orjson.loads(b"".join(body_for(found, body, machine)))

    assert made["kv_transfer_params"] == sent


def test_a_request_that_pulls_says_where_from_and_limits_no_load() -> None:
    body = orjson.dumps({"model": "m", "prompt": "hi", "kv_transfer_params": {"remote_kv_source": {"own": 1}}})
    request = ClientRequest("POST", "/v1/completions", b"", [], http_10=False, keep_alive=True, body=body)
    found = read_at_once(request, "id", False)
    assert found is not None
    source = Source("i9", "10.0.0.9", 5711, 9000, 0.5)
    machine = Machine("id", RequestSpec(0, None, 5.0, "m"), ["http://a:1"], source=source, attempt=2)

    made = orjson.loads(b"".join(body_for(found, body, machine)))

    place = {"kv_request_id": "id-2", "remote_host": "10.0.0.9", "remote_port": 5711}
    assert made["kv_transfer_params"] == {"remote_kv_source": place}


@pytest.fixture
def scheduling() -> SchedulingSettings:
    classes = (
        PriorityClassSettings(name="interactive", service_tiers=("priority",), engine_priority=-10),
        PriorityClassSettings(name="default", service_tiers=("auto", "default")),
        PriorityClassSettings(name="batch", service_tiers=("flex",), engine_priority=10),
    )
    return SchedulingSettings(
        policy="dualmap-least-cost", queue_order="deadline", classes=classes, engine_priorities=True
    )


async def test_a_class_is_chosen_by_header_tier_or_priority_up_to_that_of_the_tenant(
    start_runtime: Any, start_instance: Any, start_router: Any
) -> None:
    async def serve(talk: Any) -> None:
        await talk.answer({"sent": orjson.loads(talk.body)})

    def tenant(name: str, its_class: str | None) -> TenantSettings:
        key = TenantKeySettings(name="ci", key=SecretStr(f"{name}-secret"))
        return TenantSettings(name=name, priority_class=its_class, keys=(key,))

    tenants = (tenant("first", "interactive"), tenant("last", "batch"), tenant("none", None), tenant("odd", "no-class"))
    instance = await start_instance(serve)
    runtime = await start_runtime(instances=(tools.spec("one", url=instance.url),), tenants=tenants)
    router = await start_router(runtime.intake, tenants=runtime.tenants)
    client = await router.connect()
    numbers = itertools.count()

    async def class_of(name: str, header: str = "", **fields: Any) -> str:
        request_id = f"r{next(numbers)}"
        asked = f"x-dualmap-priority: {header}\r\n" if header else ""
        headers = f"x-api-key: {name}-secret\r\nx-request-id: {request_id}\r\n{asked}"
        client.request("/v1/chat/completions", {"model": "default", "messages": MESSAGES, **fields}, headers=headers)
        priority = (await client.answer()).json()["sent"]["priority"]
        explained = runtime.context.decisions.get(request_id)
        assert explained is not None
        assert {"interactive": -10, "default": 0, "batch": 10}[explained.terms.priority_class] == priority
        return str(explained.terms.priority_class)

    assert await class_of("first") == "interactive", "that of its tenant"
    assert await class_of("first", "batch") == "batch"
    assert await class_of("first", service_tier="flex") == "batch"
    assert await class_of("first", priority=3) == "default"
    assert await class_of("first", "default", service_tier="flex") == "default", "the header counts"
    assert await class_of("first", "no-class") == "interactive", "what is unknown counts as not said"
    assert await class_of("last", "interactive") == "batch", "no higher than its tenant's"
    assert [await class_of("none"), await class_of("none", service_tier="priority")] == ["default"] * 2
    assert [await class_of("odd"), await class_of("odd", "interactive")] == ["default"] * 2, "its tenant has none"


MESSAGES = [{"role": "user", "content": "hi"}]
