"""The conversations that instances have stored: how long they are, and whose turns."""

from __future__ import annotations

from dualmap.scheduling.values import value
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.readable import checks_replies

STORED_RESPONSES = 10_000
"""Most stored responses of which something is kept, see ``StoredResponses.keep``. One of a run counts twice."""


@value
class StoredConversation:
    """What is kept of a conversation up to a response."""

    tokens: int = 0
    run: str = ""
    """The run whose turn the response is, as a hash; empty: none is known."""


NO_CONVERSATION = StoredConversation()


class StoredResponses(Changes):
    """Stored conversations, by the id of the response that ends each."""

    @checks_replies
    async def keep(self, response_id: str, kept: StoredConversation) -> None:
        """Remember the conversation that an instance stored under this id. The last ones are kept, at least
        ``STORED_RESPONSES``, and twice as many at most."""
        new, old = self._keys.responses_new, self._keys.responses_old
        fields = (response_id, kept.tokens, *((_run_field(response_id), kept.run) if kept.run else ()))
        made = await self._make(Change((("HSET", new, *fields), ("HLEN", new))))
        if made is not None and made[-1] >= STORED_RESPONSES:
            await self._make(Change((("RENAME", new, old),)))

    @checks_replies
    async def conversation(self, response_id: str) -> StoredConversation:
        """What was kept of the conversation up to a response; nothing for an unknown one."""
        keys = (self._keys.responses_new, self._keys.responses_old)
        fields = (response_id, _run_field(response_id))
        for tokens, run in await self._calls.together([("HMGET", key, *fields) for key in keys]):
            if tokens is not None:
                return StoredConversation(int(tokens), "" if run is None else run.decode(errors="replace"))
        return NO_CONVERSATION


def _run_field(response_id: str) -> str:
    """The field that has the run of a response. No id has a blank."""
    return f"{response_id} run"
