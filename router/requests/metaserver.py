"""The endpoint from which decoders of a layerwise connector request the prefill legs of their requests.

Such a decoder is sent its leg first. Once it has memory for the prompt, it posts to the replica's metaserver where the
KV is to go; the replica sends the prefill leg there. It is known by the request's id, in the form that vLLM gives it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

PATH: Final = "/kv/metaserver"
_PREFIXES: Final = ("chatcmpl-", "cmpl-")


class Metaserver:
    """The legs of one replica that wait to be requested."""

    def __init__(self) -> None:
        self.base_url = ""
        """URL at which instances reach this replica."""
        self._expected: dict[str, asyncio.Future[dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    @property
    def url(self) -> str:
        return self.base_url + PATH

    def expect(self, request_id: str) -> asyncio.Future[dict[str, Any]]:
        """The ``kv_transfer_params`` for the prefill leg, once its decoder has posted them. The caller calls
        ``forget``."""
        return self._expected.setdefault(request_id, asyncio.get_running_loop().create_future())

    def forget(self, request_id: str) -> None:
        self._expected.pop(request_id, None)

    def requested(self, params: dict[str, Any]) -> bool:
        """Take a decoder's request for its prefill leg; False where no such request waits for it."""
        named = str(params.get("request_id", ""))
        bare = [named.removeprefix(prefix) for prefix in _PREFIXES]
        for name in (named, *bare, *(each.rpartition("-")[0] for each in bare)):
            waiting = self._expected.get(name)
            if waiting is not None:
                if not waiting.done():
                    waiting.set_result(params)
                return True
        return False
