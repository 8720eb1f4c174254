"""The calls of the Kubernetes API that a worker makes: read an object, list pages, watch, patch.

They are made with the HTTP client that the project has, not with a client library. Those that are well kept (lightkube,
kr8s, kubernetes-asyncio) reconnect watches, retry and read tokens by rules of their own, and discovery has to decide
just these: when to list again, how long silence may last, what an operator reads about a refusal. What is left of a
library then are three GET requests and a PATCH, for which it brings models of every kind of object.
"""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.runtime.trust import system_trust

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Timeout of each part of a reply; a watch has bounds of its own."""
PAGE_LIMIT = 500
MAX_PAGE_BYTES = 256 * 2**20
MAX_EVENT_BYTES = 8 * 2**20
"""An object is 1.5 MiB at most in a cluster with the usual limits."""
MAX_RETRY_AFTER_S = 120.0
_SHOWN_CHARACTERS = 300


class ApiError(Exception):
    """The API server refused a call, or replied what cannot be understood. The message says what to do."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """Pause that the server requests; 0 if it requests none."""


class ExpiredError(ApiError):
    """The version that a list or a watch continues from is too old: list again."""


def refusal(status: int, message: str, retry_after: str = "") -> ApiError:
    """The error that a status stands for, with the message of the server."""
    said = f"{status} {message[:_SHOWN_CHARACTERS]}".strip()
    if status == 410:
        return ExpiredError(said)
    hint = {
        401: "; is the token of this cluster, and not expired?",
        403: "; the worker's account needs a Role with this right, see docs/getting-started/kubernetes.md",
        409: "; it was changed meanwhile, and is read again",
        404: "; is the namespace right, and is the resource installed in the cluster?",
    }.get(status, "")
    seconds = float(retry_after) if retry_after.isdecimal() else 0.0
    return ApiError(said + hint, min(seconds, MAX_RETRY_AFTER_S))


class KubernetesApi:
    """An API server. Use as a context manager, whose end closes its connections."""

    def __init__(self, settings: KubernetesSettings, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._settings = settings
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._trusted: tuple[Path, int] | None = None

    async def __aenter__(self) -> KubernetesApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    @property
    def namespace(self) -> str:
        """The configured one, else that of the pod this runs in."""
        if self._settings.namespace is not None:
            return self._settings.namespace
        with contextlib.suppress(OSError):
            return (SERVICE_ACCOUNT / "namespace").read_text("utf-8").strip()
        return "default"

    async def get(self, path: str, params: Mapping[str, str | int] | None = None) -> dict[str, Any]:
        """One object, or one page of a list. Raises ApiError, httpx.HTTPError, OSError."""
        return await self._call("GET", path, params=params)

    async def pages(self, path: str, selector: Mapping[str, str]) -> AsyncIterator[dict[str, Any]]:
        """The pages of a list, all of one version, each with ``metadata``. Raises as ``get``."""
        more: dict[str, str | int] = {}
        while True:
            page = await self.get(path, {**selector, "limit": PAGE_LIMIT, **more})
            metadata = page.get("metadata")
            if not isinstance(metadata, dict) or not isinstance(page.get("items"), list | None):
                raise ApiError("the API server replied no list; is api_url right?")
            yield page
            token = metadata.get("continue")
            if not token:
                return
            more = {"continue": str(token)}

    async def patch(self, path: str, patch: Mapping[str, Any]) -> dict[str, Any]:
        """Merge ``patch`` into an object; a ``metadata.resourceVersion`` in it has to be the present one. Returns the
        object after it. Raises as ``get``."""
        headers = {"content-type": "application/merge-patch+json"}
        return await self._call("PATCH", path, content=json.dumps(patch).encode(), more=headers)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str | int] | None = None,
        content: bytes | None = None,
        more: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        client = await self._current()
        headers = {**self._headers(), **(more or {})}
        async with client.stream(method, path, params=params, content=content, headers=headers) as answer:
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > MAX_PAGE_BYTES:
                    raise ApiError(f"a reply is longer than {MAX_PAGE_BYTES} bytes")
        if answer.status_code != 200:
            raise refusal(answer.status_code, message_of(bytes(body)), answer.headers.get("retry-after", ""))
        return object_from(bytes(body))

    @contextlib.asynccontextmanager
    async def watch(self, path: str, params: Mapping[str, str | int]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a watch, as they come. How long to wait for one is the caller's to bound. Raises as ``get``."""
        client = await self._current()
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, read=None)
        async with client.stream("GET", path, params=params, headers=self._headers(), timeout=timeout) as answer:
            if answer.status_code != 200:
                body = await answer.aread()
                raise refusal(answer.status_code, message_of(body), answer.headers.get("retry-after", ""))
            yield _events(answer)

    def _headers(self) -> dict[str, str]:
        """Headers with the token as it is now: that of a service account is replaced about hourly."""
        token_file = self._settings.token_file
        try:
            token = (token_file or SERVICE_ACCOUNT / "token").read_text("utf-8").strip()
        except OSError as error:
            if token_file is None:  # a proxy of kubectl wants none
                return {}
            raise ApiError(f"token_file {token_file}: {error.strerror}") from error
        return {"authorization": f"Bearer {token}"}

    async def _current(self) -> httpx.AsyncClient:
        """The client, made again where the file of the CA was replaced."""
        trusted = self._ca_stamp()
        if self._client is None or trusted != self._trusted:
            await self.close()
            self._client = httpx.AsyncClient(
                base_url=self._base_url(),
                verify=self._trust(trusted),
                timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                transport=self._transport,
                trust_env=False,  # the API server is in the cluster: no proxy leads there
            )
            self._trusted = trusted
        return self._client

    def _base_url(self) -> str:
        if self._settings.api_url is not None:
            return self._settings.api_url
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ApiError("this worker runs in no Kubernetes cluster: set pools[].discovery.kubernetes.api_url")
        return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"

    def _ca_stamp(self) -> tuple[Path, int] | None:
        """The file of the CA with the time of its last change; None: the system's are trusted."""
        path = self._settings.ca_file or SERVICE_ACCOUNT / "ca.crt"
        try:
            return path, path.stat().st_mtime_ns
        except OSError as error:
            if self._settings.ca_file is None:
                return None
            raise ApiError(f"ca_file {path}: {error.strerror}") from error

    def _trust(self, trusted: tuple[Path, int] | None) -> ssl.SSLContext:
        if trusted is None:
            return system_trust()
        try:
            return ssl.create_default_context(cafile=trusted[0])
        except (OSError, ssl.SSLError) as error:
            raise ApiError(f"the CA's file {trusted[0]} holds no PEM that can be used: {error}") from error


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """One JSON object a line. Only line feeds end a line: texts of objects may contain what Python takes for one."""
    rest = bytearray()
    async for part in answer.aiter_bytes():
        rest += part
        *lines, last = rest.split(b"\n")
        if len(last) > MAX_EVENT_BYTES:
            raise ApiError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.strip():
                yield object_from(bytes(line))
        rest = last


def object_from(body: bytes) -> dict[str, Any]:
    """Raises ApiError where it is no JSON object."""
    try:
        read = json.loads(body)
    except ValueError as error:
        shown = body[:80].decode("utf-8", "replace")
        raise ApiError(f"the API server replied no JSON, but {shown!r}; is api_url right?") from error
    if not isinstance(read, dict):
        raise ApiError(f"the API server replied no object, but {type(read).__name__}; is api_url right?")
    return read


def message_of(body: bytes) -> str:
    """The message of a Status object, else the body itself."""
    with contextlib.suppress(ApiError):
        message = object_from(body).get("message")
        if isinstance(message, str):
            return message
    return body[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
