"""A server of vLLM's interface, as the suite asks it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson


@dataclass(frozen=True, slots=True)
class Server:
    """The emulator, or a real vLLM."""

    http: httpx.AsyncClient
    model: str
    max_model_len: int
    real: bool
    kv_events: str | None = None
    """Endpoints; None: not known."""
    kv_replay: str | None = None

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of a successful answer."""
        answer = await self.http.post(path, json={"model": self.model, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of a refusal."""
        answer = await self.http.post(path, json={"model": self.model, **body})
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()

    async def stream(self, path: str, **body: Any) -> list[tuple[str, Any]]:
        """Names ("" for none) and JSON of the events; ``[DONE]`` as it is."""
        answer = await self.http.post(path, json={"model": self.model, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = []
        for event in answer.text.split("\n\n"):
            lines = dict(line.split(": ", 1) for line in event.strip().splitlines())
            if "data" in lines:
                data = lines["data"]
                events.append((lines.get("event", ""), data if data == "[DONE]" else orjson.loads(data)))
        return events


@contextlib.asynccontextmanager
async def connected(url: str, *, real: bool) -> AsyncIterator[Server]:
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False, trust_env=False) as http:
        card = (await http.get("/v1/models")).json()["data"][0]
        yield Server(http, card["id"], card["max_model_len"], real)
