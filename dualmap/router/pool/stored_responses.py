"""How long the conversations are that instances have stored: what a continued response does not send, and yet takes."""

from __future__ import annotations

import asyncio
import logging

from dualmap.router.pool.failover import FailoverPool
from dualmap.router.prompts.inference_request import InferenceRequest, response_id
from dualmap.scheduling.request.outcome import Usage
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)


class StoredResponses:
    """Stored responses of one pool, as all replicas know them."""

    def __init__(self, store: FailoverPool) -> None:
        self._store = store
        self._keeping: set[asyncio.Task[None]] = set()

    async def tokens(self, continued: str) -> int:
        """Tokens of the conversation up to this response; 0 where they are not known."""
        if self._store.degraded:
            return 0
        try:
            return await self._store.responses.tokens(continued)
        except StoreError as error:
            log.debug("the length of a stored response cannot be read: %s", error)
            return 0

    def answered(self, request_id: str, instance_id: str, sent: InferenceRequest, usage: Usage) -> None:
        """Keep, in the background, the length of an answer that was stored under an id that the fleet gave it."""
        if not (sent.stores and sent.leaves_id_open and usage.prompt_tokens) or self._store.degraded:
            return
        tokens = usage.prompt_tokens + (usage.output_tokens or 0)
        keeping = self._keep(response_id(request_id, instance_id, sent.tenant), tokens)
        task = asyncio.get_running_loop().create_task(keeping)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(self, response: str, tokens: int) -> None:
        try:
            await self._store.responses.keep(response, tokens)
        except StoreError as error:
            log.debug("the length of a stored response cannot be kept: %s", error)
