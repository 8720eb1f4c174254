"""The conversations that instances have stored: what a continued response does not send, and yet takes, and its run."""

from __future__ import annotations

import asyncio
import logging

from dualmap.router.pool.failover import FailoverPool
from dualmap.router.prompts.inference_request import InferenceRequest, response_id
from dualmap.scheduling.request.outcome import Usage
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool.stored_responses import NO_CONVERSATION, StoredConversation

log = logging.getLogger(__name__)


class StoredResponses:
    """Stored responses of one pool, as all replicas know them."""

    def __init__(self, store: FailoverPool) -> None:
        self._store = store
        self._keeping: set[asyncio.Task[None]] = set()

    async def conversation(self, continued: str) -> StoredConversation:
        """The conversation up to this response; nothing where it is not known."""
        if self._store.degraded:
            return NO_CONVERSATION
        try:
            return await self._store.responses.conversation(continued)
        except StoreError as error:
            log.debug("a stored response cannot be read: %s", error)
            return NO_CONVERSATION

    def answered(self, request_id: str, instance_id: str, sent: InferenceRequest, usage: Usage, run: str) -> None:
        """Keep, in the background, the length and the run of an answer that was stored under an id that the fleet gave
        it."""
        if not (sent.stores and sent.leaves_id_open and usage.prompt_tokens) or self._store.degraded:
            return
        tokens = usage.prompt_tokens + (usage.output_tokens or 0)
        kept = StoredConversation(tokens, run)
        keeping = self._keep(response_id(request_id, instance_id, sent.tenant), kept)
        task = asyncio.get_running_loop().create_task(keeping)
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(self, response: str, kept: StoredConversation) -> None:
        try:
            await self._store.responses.keep(response, kept)
        except StoreError as error:
            log.debug("a stored response cannot be kept: %s", error)
