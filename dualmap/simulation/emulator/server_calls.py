"""Calls from one emulated server to another."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import orjson

from dualmap.simulation.http_client import HttpClient, HttpClientError


async def post(url: str, body: dict[str, Any], within_s: float) -> dict[str, Any] | None:
    """The JSON object that the server there answers; None where it gives none with status 200 in time."""
    parts, answer = urlsplit(url), bytearray()
    client = HttpClient(f"{parts.scheme}://{parts.netloc}", connect_timeout_s=within_s)
    try:
        async with asyncio.timeout(within_s):
            reply = await client.request("POST", parts.path, orjson.dumps(body), on_body=answer.extend)
    except (HttpClientError, TimeoutError):
        return None
    finally:
        client.close()
    if reply.status != 200:
        return None
    document = orjson.loads(bytes(answer) or b"{}")
    return document if isinstance(document, dict) else None
