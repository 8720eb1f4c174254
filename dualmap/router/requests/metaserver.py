"""The endpoint from which decoders of a layerwise connector request the prefill legs of their requests.

Such a decoder is sent its leg first. Once it has memory for the prompt, it posts to the replica's metaserver where the
KV is to go; the replica sends the prefill leg there. The URL that a decode leg carries has a token in its path that is
made for this leg alone: the token, and nothing else, says whose KV goes to the host in the post. A request's id is no
secret, since clients choose it and logs have it.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any, Final

FOLDER: Final = "/kv/metaserver/"
_TOKEN_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """The call by which the decoder of one leg requests its prefill leg."""

    token: str
    url: str
    params: asyncio.Future[dict[str, Any]]
    """The ``kv_transfer_params`` for the prefill leg, once the decoder has posted them."""


class Metaserver:
    """The legs of one replica that wait to be requested."""

    def __init__(self) -> None:
        self.base_url = ""
        """URL at which instances reach this replica."""
        self._expected: dict[str, PrefillCall] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self) -> PrefillCall:
        """Wait for the decoder of one leg, which is sent the URL. The caller calls ``forget``."""
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        url = f"{self.base_url}{FOLDER}{token}"
        call = PrefillCall(token, url, asyncio.get_running_loop().create_future())
        self._expected[token] = call
        return call

    def forget(self, call: PrefillCall) -> None:
        self._expected.pop(call.token, None)

    def requested(self, token: str, params: dict[str, Any]) -> bool:
        """Take a decoder's request for its prefill leg; False where no leg with this token waits, or where it was
        requested with other params before. A decoder that lost the answer may repeat what it posted."""
        call = self._expected.get(token)
        if call is None:
            return False
        if not call.params.done():
            call.params.set_result(params)
            return True
        return not call.params.cancelled() and call.params.result() == params
