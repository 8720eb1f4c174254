"""What web pages may do at the paths of operators, by the fields that browsers send."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dualmap.router.http.paths import ENGINE_CONTROL_PATHS
from tests.router import tools

FORM = {"content-type": "application/x-www-form-urlencoded"}


async def status_of(client: Any, method: str, path: str, **fields: str) -> int:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    answer = await client.request(method, path, headers=headers)
    if answer.status_code == 403:
        assert answer.json()["error"]["code"] == "foreign_page"
        assert "router.admin_" in answer.json()["error"]["message"]
    return int(answer.status_code)


@pytest.fixture
async def client(start_runtime: Any, client_of: Any) -> Any:
    return client_of(await start_runtime(instances=(tools.spec("a"),)))


FOREIGN: list[dict[str, str]] = [
    {"host": "127.0.0.1:8000", "origin": "https://evil.example"},
    {"host": "127.0.0.1:8000", "origin": "null"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:3000"},
    {"host": "127.0.0.1:8000", "origin": "https://127.0.0.1"},
    {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000.evil.example"},
    {"host": "127.0.0.1:8000", "origin": "http://[bad"},
    {"host": "127.0.0.1:8000", "sec_fetch_site": "cross-site"},
    {"host": "localhost:8000", "sec_fetch_site": "same-site"},
    {
        "host": "127.0.0.1:8000",
        "sec_fetch_site": "cross-site",
        "sec_fetch_mode": "navigate",
        "sec_fetch_dest": "iframe",
    },
    {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec_fetch_site": "same-origin"},
    {"host": "evil.example"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "localhost.evil.example."},
]


@pytest.mark.parametrize("fields", FOREIGN, ids=str)
async def test_a_page_from_elsewhere_may_neither_change_nor_read(client: Any, fields: dict[str, str]) -> None:
    assert await status_of(client, "POST", "/admin/instances/a/drain", **fields, **FORM) == 403
    assert await status_of(client, "DELETE", "/admin/instances/a", **fields) == 403
    assert await status_of(client, "GET", "/admin/instances", **fields) == 403
    assert await status_of(client, "GET", "/ui/stream", **fields) == 403
    for path, method in ENGINE_CONTROL_PATHS.items():
        assert await status_of(client, method, path, **fields) == 403, path

    assert (await client.get("/admin/instances")).json()["instances"][0]["state"] == "ready"


async def test_a_form_of_another_page_that_navigates_is_no_followed_link(client: Any) -> None:
    navigation = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert await status_of(client, "POST", "/admin/instances/a/drain", host="localhost", **navigation) == 403
    assert await status_of(client, "GET", "/admin/instances", host="localhost", **navigation) == 200


OWN: list[dict[str, str]] = [
    {"host": "127.0.0.1:8000"},
    {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
    {"host": "10.1.2.3:8000", "origin": "http://10.1.2.3:8000"},
    {"host": "localhost:8000", "origin": "http://localhost:8000", "sec_fetch_site": "same-origin"},
    {"host": "LOCALHOST.", "origin": "http://localhost:80"},
    {"host": "router:8000", "user_agent": "Prometheus/2.50"},
    {"host": "dualmap-router.llm.svc.cluster.local:8000"},
    {"host": "localhost:8000", "sec_fetch_site": "none", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    {"host": socket.gethostname()},
]


@pytest.mark.parametrize("fields", OWN, ids=str)
async def test_the_live_page_and_commands_are_served(client: Any, fields: dict[str, str]) -> None:
    assert await status_of(client, "GET", "/admin/instances", **fields) == 200
    assert await status_of(client, "POST", "/admin/instances/a/drain", **fields) == 200


async def test_a_proxy_whose_name_is_set_may_keep_or_replace_the_host(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),), admin_hosts=("LLM.example",)))
    page = {"origin": "https://llm.example", "sec_fetch_site": "same-origin"}

    for host in ("llm.example", "10.0.0.9:8000"):
        assert await status_of(client, "POST", "/admin/instances/a/drain", host=host, **page) == 200
    assert await status_of(client, "GET", "/admin/instances", host="other.example") == 403


async def test_where_a_key_is_needed_the_key_alone_decides(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(tools.spec("a"),), admin_key="boss"))
    behind = {"host": "llm.example", "origin": "https://console.example", "sec_fetch_site": "cross-site"}

    assert await status_of(client, "GET", "/admin/instances", **behind, authorization="Bearer boss") == 200
    assert await status_of(client, "GET", "/admin/instances", **behind) == 401


async def test_pages_may_see_what_is_for_everybody(client: Any) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/ready"):
        assert await status_of(client, "GET", path, host="llm.example", origin="https://evil.example") == 200
