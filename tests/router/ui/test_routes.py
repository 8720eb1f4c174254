"""The live page over HTTP."""

from __future__ import annotations

import re
from typing import Any

import pytest


async def test_the_page_and_its_files_need_no_key_and_no_foreign_host(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(admin_key="root"))

    page = await client.get("/ui")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    files = {name: await client.get(f"/{name}") for name in named}

    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert {answer.status_code for answer in files.values()} == {200}
    assert {"ui/app.js", "ui/style.css"} <= set(files)
    for text in (page.text, *(answer.text for answer in files.values())):
        assert [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url] == []
    assert "default-src 'none'" in page.headers["content-security-policy"]


async def test_every_module_that_a_module_names_is_served(start_runtime: Any, client_of: Any) -> None:
    client, asked, wanted = client_of(await start_runtime()), set[str](), {"app.js"}
    while wanted:
        name = wanted.pop()
        asked.add(name)
        answer = await client.get(f"/ui/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith("text/javascript")
        wanted |= set(re.findall(r'from "\./([a-z]+\.js)"', answer.text)) - asked

    assert {"stream.js", "rings.js", "story.js"} <= asked


@pytest.mark.parametrize("path", ["/ui/stream", "/ui/replica-stream"])
async def test_the_streams_need_the_admin_key(start_runtime: Any, client_of: Any, path: str) -> None:
    client = client_of(await start_runtime(admin_key="root", api_keys=["user"]))

    for headers in ({}, {"authorization": "Bearer user"}):
        assert (await client.get(path, headers=headers)).status_code == 401


async def test_an_operator_may_switch_it_off(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(ui=False))

    assert [(await client.get(path)).status_code for path in ("/ui", "/ui/app.js", "/ui/stream")] == [404] * 3


async def test_what_is_not_there_is_said(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime())

    missing = await client.get("/ui/nothing.js")

    assert missing.status_code == 404
    assert "the live page is at /ui" in missing.json()["error"]["message"]
    assert (await client.get("/ui/")).headers["location"] == "../ui"
