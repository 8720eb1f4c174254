"""Calls by which vLLM loads and unloads LoRA adapters, and what its answers mean."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx
import orjson

from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.state.model_names import ModelList
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, Step

LOAD_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_PATH: Final = "/v1/unload_lora_adapter"
CONNECT_TIMEOUT_S: Final = 5.0
LIST_TIMEOUT_S: Final = 5.0
LOAD_TIMEOUT_S: Final = 300.0
"""Timeout of one load: from a slow disk, or with a download, it takes minutes at worst."""
_NOT_OFFERED: Final = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED})
_LOADED_ALREADY: Final = "has already been loaded"

NOT_OFFERED: Final = (
    "it loads no adapters at run time: start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (and"
    " one API process)"
)
NOT_LISTED: Final = (
    "it answered that it has the adapter, and does not list it: several API processes, or a balancer, behind one URL"
    " each know their own adapters alone; give each server a URL of its own"
)


UNREAD: Final = ModelList()


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a call."""

    complaint: str = ""
    """What is wrong and what to do, in words; empty: the server is as it should be."""
    listed: ModelList = UNREAD
    """The names that the server lists since."""
    status: int = 0
    """The status of the answer that the complaint is about; 0: there was none."""


class EngineAdapters:
    """Loads and unloads adapters on servers. Never raises for what a server does."""

    def __init__(
        self,
        api_key: str | None = None,
        trust: InstanceTrust | None = None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``api_key`` is sent to servers; ``transport`` replaces the network in tests."""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._trust = trust or InstanceTrust()
        self._transport = transport

    async def make(self, url: str, name: str, adapter: RegisteredAdapter, step: Step) -> Made:
        """Have the server make this step, and see what it lists then."""
        timeout = httpx.Timeout(LOAD_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        async with httpx.AsyncClient(
            headers=self._headers,
            verify=self._trust.context,
            trust_env=False,
            timeout=timeout,
            transport=self._transport,
        ) as client:
            if step is Step.UNLOAD:
                return await self._unload(client, url, name)
            return await self._load(client, url, name, adapter, replaces=step is Step.REPLACE)

    async def _load(
        self, client: httpx.AsyncClient, url: str, name: str, adapter: RegisteredAdapter, *, replaces: bool
    ) -> Made:
        body: dict[str, Any] = {"lora_name": name, "lora_path": adapter.engine_path}
        if replaces:
            body["load_inplace"] = True
        if adapter.is_3d:
            body["is_3d_lora_weight"] = True
        status, text = await _post(client, url + LOAD_PATH, body)
        was_there = _LOADED_ALREADY in text
        if not (_succeeded(status) or was_there):
            return _refused(status, text)
        listed = await _list(client, url)
        if listed.models is not None and name not in listed.models:
            return Made(NOT_LISTED, listed, status)
        if was_there and not replaces and listed.paths.get(name, adapter.engine_path) != adapter.engine_path:
            return await self._load(client, url, name, adapter, replaces=True)
        return Made(listed=listed)

    async def _unload(self, client: httpx.AsyncClient, url: str, name: str) -> Made:
        status, text = await _post(client, url + UNLOAD_PATH, {"lora_name": name})
        listed = await _list(client, url)
        if _succeeded(status) or (listed.models is not None and name not in listed.models):
            return Made(listed=listed)
        return _refused(status, text)


def _succeeded(status: int) -> bool:
    return 200 <= status < 300


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[int, str]:
    try:
        answer = await client.post(url, json=body)
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        return 0, str(error) or type(error).__name__
    return answer.status_code, answer.text


async def _list(client: httpx.AsyncClient, url: str) -> ModelList:
    try:
        answer = await client.get(f"{url}/v1/models", timeout=LIST_TIMEOUT_S)
        return ModelList.of(answer.json() if answer.is_success else None, answer.status_code)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError):
        return UNREAD


def _refused(status: int, text: str) -> Made:
    if not status:
        return Made(f"it cannot be reached: {text}")
    message = _message_of(text)
    if status in _NOT_OFFERED and message is None:
        return Made(NOT_OFFERED, status=status)
    return Made(f"it answered {status}: {message or text[:200]}", status=status)


def _message_of(text: str) -> str | None:
    """The words of an error in vLLM's form; None where it is not in it, as where the server has no such path."""
    try:
        found = orjson.loads(text)
        message = found["error"]["message"] if "error" in found else found["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) else None
