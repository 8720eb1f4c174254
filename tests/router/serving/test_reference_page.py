"""The page of the operation API, which is in the origin of the live page and its admin key."""

from __future__ import annotations

import re
from typing import Any

from dualmap.router.serving.reference_page import reference_page


async def test_docs_load_nothing_and_run_nothing(start_runtime: Any, client_of: Any) -> None:
    answer = await client_of(await start_runtime()).get("/docs")

    assert answer.status_code == 200
    assert "<script" not in answer.text.lower()
    assert re.findall(r"""(?:src|href|action)=["']?([^"' >]+)""", answer.text) == ["openapi.json"]
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "script-src" not in answer.headers["content-security-policy"]


async def test_docs_name_every_operation_and_the_fields_of_its_body(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime())
    described, page = (await client.get("/openapi.json")).json(), (await client.get("/docs")).text

    for path, methods in described["paths"].items():
        for method in methods:
            assert f"{method.upper()} {path}" in page
    assert "<code>max_running_requests</code>" in page
    assert "integer or null" in page


def test_text_of_a_description_is_no_markup() -> None:
    operation = {"tags": ["<b>"], "description": "<img src=x>", "parameters": []}
    page = reference_page({"info": {"title": "t", "version": "<i>"}, "paths": {"/a": {"get": operation}}})

    assert not re.search("<(b|img|i)[ >]", page)
