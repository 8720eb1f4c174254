"""Servers that load and unload LoRA adapters as vLLM does, in place of a network."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import httpx
import orjson

BASE = "default"


@dataclass
class AdapterServer:
    """One server, by the host of its URL."""

    adapters: dict[str, str] = field(default_factory=dict)
    """The paths of what it has loaded, by name."""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """What it was called for: load, replace or unload, the name and the path."""
    at_run_time: bool = True
    away: bool = False
    hides: bool = False
    """It lists none of its adapters, as another API process of it would."""
    missing: frozenset[str] = frozenset()
    """Paths where nothing is."""
    goes: asyncio.Event | None = None
    """Loads wait for it."""

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.away:
            raise httpx.ConnectError("nobody listens")
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": BASE, "root": BASE, "parent": None}, *self._cards()]})
        if not self.at_run_time or path not in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            return httpx.Response(404, json={"detail": "Not Found"})
        body = orjson.loads(request.content)
        if path == "/v1/unload_lora_adapter":
            return self._unload(body["lora_name"])
        return await self._load(body["lora_name"], body["lora_path"], replaces=body.get("load_inplace", False))

    def _cards(self) -> list[dict[str, str]]:
        return [] if self.hides else [{"id": k, "root": path, "parent": BASE} for k, path in self.adapters.items()]

    async def _load(self, name: str, path: str, *, replaces: bool) -> httpx.Response:
        self.calls.append(("replace" if replaces else "load", name, path))
        if name in self.adapters and not replaces:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if path in self.missing:
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        if self.goes is not None:
            await self.goes.wait()
        self.adapters[name] = path
        return httpx.Response(200, text="Success")

    def _unload(self, name: str) -> httpx.Response:
        self.calls.append(("unload", name, ""))
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return httpx.Response(200, text="Success")


def _error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": status}})


class AdapterServers(httpx.AsyncBaseTransport):
    """The servers of a fleet whose URLs are ``http://ID.test:8000``."""

    def __init__(self) -> None:
        self.of: dict[str, AdapterServer] = {}

    def add(self, *names: str) -> None:
        for name in names:
            self.of[name] = AdapterServer()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.of[request.url.host.removesuffix(".test")].answer(request)
