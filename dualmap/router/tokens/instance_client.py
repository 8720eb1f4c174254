"""Questions of one replica to the instances of one pool: how they render and tokenize a prompt.

They take the instances' servers' time from inference, so few are under way at a time, whatever they are for.
"""

from __future__ import annotations

import asyncio
from typing import Final

import httpx

from dualmap.runtime.trust import InstanceTrust

MAX_ASKING: Final = 4
"""Requests to instances at a time, of this replica."""
QUERY_TIMEOUT_S: Final = 10.0
_PROMPT_AT_FAULT: Final = 400


class TokenizeError(Exception):
    """An instance does not answer the question; the message says why."""


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
        self.turn: Final = asyncio.Semaphore(MAX_ASKING)
        """Held by each question of a client's prompt, from before its body is made."""

    async def post(self, url: str, content: bytes) -> bytes | None:
        """The body of the answer; None where the prompt is at fault: the request itself will be refused alike.

        Raises:
            TokenizeError: there is no answer.
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
            async with asyncio.timeout(QUERY_TIMEOUT_S):
                answer = await self._client.post(url, content=content)
            if answer.status_code == _PROMPT_AT_FAULT:
                return None
            answer.raise_for_status()
            return answer.content
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise TokenizeError(repr(error)) from error

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
