"""Pages of other origins: what their browser is told, of preflight requests and of answers from every source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import ValidationError

from dualmap.router.errors import NoInstanceError
from dualmap.router.settings import RouterSettings
from tests.router.http import kit
from tests.router.http.kit import Answer, Client, Instance, StartInstance, StartRouter, Talk

ALLOWED = "https://chat.example"
PREFLIGHT = f"origin: {ALLOWED}\r\naccess-control-request-method: POST\r\n"


async def answer_as_vllm_does(talk: Talk) -> None:
    await talk.answer(extra="access-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\n")


StartPage = Callable[..., Awaitable[tuple[Instance, Client]]]


@pytest.fixture
def page(start_instance: StartInstance, start_router: StartRouter) -> StartPage:
    """A router in front of one instance, and a connected client."""

    async def start(*, refusal: Any = None, **settings: Any) -> Any:
        instance = await start_instance(answer_as_vllm_does)
        router = await start_router(kit.Intake([instance.url], refusal=refusal), **settings)
        return instance, await router.connect()

    return start


def told(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models"])
async def test_a_preflight_request_needs_no_key_and_allows_what_the_page_asks_for(page: StartPage, path: str) -> None:
    _, client = await page(cors_origins=(ALLOWED,), api_keys=("k",))
    client.request(path, method="OPTIONS", headers=PREFLIGHT + "access-control-request-headers: authorization, x-y\r\n")
    answer = await client.answer()
    assert answer.status == 204
    assert told(answer) == {
        "access-control-allow-origin": ALLOWED,
        "access-control-allow-methods": "GET, POST, DELETE",
        "access-control-allow-headers": "authorization, x-y",
        "access-control-max-age": "600",
    }
    assert answer.headers["vary"] == "origin"


async def test_an_answer_may_be_read_by_the_page_and_so_may_its_fleet_fields(page: StartPage) -> None:
    instance, client = await page(cors_origins=(ALLOWED, "http://localhost:3000"))
    client.chat(headers=f"origin: {ALLOWED}\r\n")
    answer = await client.answer()
    assert answer.status == 200
    assert told(answer)["access-control-allow-origin"] == ALLOWED
    assert "x-dualmap-instance" in told(answer)["access-control-expose-headers"].split(", ")
    assert "access-control-allow-credentials" not in told(answer)
    assert "origin" not in instance.talks[0].headers


async def test_errors_and_the_apps_answers_may_be_read_as_well(page: StartPage) -> None:
    _, client = await page(cors_origins=("*",), api_keys=("k",), refusal=NoInstanceError("none"))
    client.chat(headers="origin: null\r\n")
    client.chat(headers="origin: null\r\nauthorization: Bearer k\r\n")
    client.request("/v1/models", method="GET", headers="origin: null\r\nauthorization: Bearer k\r\n")
    for status in (401, 503, 200):
        answer = await client.answer()
        assert (answer.status, told(answer)["access-control-allow-origin"]) == (status, "*")


async def test_what_is_no_inference_is_read_by_no_page(page: StartPage) -> None:
    _, client = await page(cors_origins=("*",))
    client.request("/admin/instances", method="OPTIONS", headers=PREFLIGHT)
    client.request("/health", method="GET", headers="origin: null\r\n")
    assert told(await client.answer()) == {}
    assert told(await client.answer()) == {}


@pytest.mark.parametrize("settings", [{}, {"cors_origins": ("https://other.example", "http://chat.example")}])
async def test_other_pages_may_read_nothing_whatever_the_instance_says(page: StartPage, settings: Any) -> None:
    _, client = await page(**settings)
    client.chat(headers=f"origin: {ALLOWED}\r\n")
    client.request("/v1/chat/completions", method="OPTIONS", headers=PREFLIGHT)
    assert told(await client.answer()) == {}
    assert told(await client.answer()) == {}


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/app", ""])
def test_an_origin_that_no_browser_sends_stops_the_start(origin: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        RouterSettings(cors_origins=(origin,))
