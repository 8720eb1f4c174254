"""How long the conversations are that instances have stored."""

from __future__ import annotations

from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.readable import checks_replies

STORED_RESPONSES = 10_000
"""Most stored responses of which the length is kept, see ``StoredResponses.keep``."""


class StoredResponses(Changes):
    """Lengths of stored conversations, by the id of the response that ends each."""

    @checks_replies
    async def keep(self, response_id: str, tokens: int) -> None:
        """Remember how long the conversation is that an instance stored under this id. The last ones are kept, at least
        ``STORED_RESPONSES``, and twice as many at most."""
        new, old = self._keys.responses_new, self._keys.responses_old
        made = await self._make(Change((("HSET", new, response_id, tokens), ("HLEN", new))))
        if made is not None and made[-1] >= STORED_RESPONSES:
            await self._make(Change((("RENAME", new, old),)))

    @checks_replies
    async def tokens(self, response_id: str) -> int:
        """The tokens that were kept of a response; 0 for an unknown one."""
        keys = (self._keys.responses_new, self._keys.responses_old)
        kept = await self._calls.together([("HGET", key, response_id) for key in keys])
        return next((int(text) for text in kept if text is not None), 0)
