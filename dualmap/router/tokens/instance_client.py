"""Questions of one replica to the instances of one pool: how they render and tokenize a prompt.

They take the instances' servers' time from inference, so few are under way at a time, whatever they are for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx

from dualmap.runtime.trust import InstanceTrust

MAX_ASKING: Final = 5
"""Requests to instances at a time, of this replica."""
MAX_ASKING_FOR_TENANT: Final = 4
"""Requests of one tenant to instances at a time: whatever it sends, others have their turn."""
MAX_WAITING: Final = 80
"""Prompts of one kind that wait for an answer; one more is estimated at once."""
MAX_WAITING_FOR_TENANT: Final = 64
QUERY_TIMEOUT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 64 << 20
"""A longer answer is none: a megabyte of text takes about ten."""
_PROMPT_AT_FAULT: Final = (400, 413, 422, 500)
"""Statuses by which an instance refuses a prompt. vLLM answers 500 where an image cannot be fetched."""


class TokenizeError(Exception):
    """An instance does not answer the question; the message says why."""


class LateAnswerError(TokenizeError):
    """It does not answer in time, which may be due to the prompt, as where an image is fetched from a slow place."""


class Waiting:
    """Prompts that wait for an answer, by tenants: whatever one sends, others have room."""

    def __init__(self) -> None:
        self._prompts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def has_room(self, tenant: str, size_bytes: int, most_bytes: int) -> bool:
        """Whether one more may wait, with so many bytes. All together have no more than ``most_bytes``, and several of
        a tenant no more of these than of places."""
        share = most_bytes * MAX_WAITING_FOR_TENANT // MAX_WAITING
        own, own_bytes = self._prompts[tenant], self._bytes[tenant] + size_bytes
        has_own_room = own == 0 or (own < MAX_WAITING_FOR_TENANT and own_bytes <= share)
        return has_own_room and self._prompts.total() < MAX_WAITING and self._bytes.total() + size_bytes <= most_bytes

    def enter(self, tenant: str, size_bytes: int) -> None:
        self._prompts[tenant] += 1
        self._bytes[tenant] += size_bytes

    def leave(self, tenant: str, size_bytes: int) -> None:
        self._prompts[tenant] -= 1
        self._bytes[tenant] -= size_bytes
        if not self._prompts[tenant]:
            del self._prompts[tenant], self._bytes[tenant]


@dataclass(slots=True)
class _Turns:
    """The questions of one tenant."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_ASKING_FOR_TENANT))
    users: int = 0


class InstanceClient:
    """Connections to the instances of one pool."""

    def __init__(
        self,
        *,
        authorization: str | None = None,
        trust: InstanceTrust | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``transport`` replaces the network in tests."""
        self._headers = {"content-type": "application/json"}
        if authorization is not None:
            self._headers["authorization"] = authorization
        self._trust = trust or InstanceTrust()
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._turns = asyncio.Semaphore(MAX_ASKING)
        self._tenants: defaultdict[str, _Turns] = defaultdict(_Turns)
        """The tenants that have a question."""

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Held by each question of a client's prompt, from before its body is made."""
        own = self._tenants[tenant]
        own.users += 1
        try:
            async with own.turns, self._turns:
                yield
        finally:
            own.users -= 1
            if not own.users:
                del self._tenants[tenant]

    async def post(self, url: str, content: bytes) -> bytes | None:
        """The body of the answer; None where the prompt is at fault: the request itself will be refused alike.

        Raises:
            LateAnswerError: there is no answer in time.
            TokenizeError: there is none.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(
                headers=self._headers,
                verify=self._trust.context,
                trust_env=False,
                transport=self._transport,
                timeout=QUERY_TIMEOUT_S,
            )
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S), self._client.stream("POST", url, content=content) as answer:
                if answer.status_code in _PROMPT_AT_FAULT:
                    return None
                answer.raise_for_status()
                body = bytearray()
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_BYTES:
                        raise TokenizeError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
                return bytes(body)
        except (TimeoutError, httpx.ReadTimeout) as error:
            raise LateAnswerError(f"no answer within {QUERY_TIMEOUT_S:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise TokenizeError(repr(error)) from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
