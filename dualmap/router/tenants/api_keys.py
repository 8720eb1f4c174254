"""API keys: how a request sends one, and whether it is valid."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from typing import Final

from dualmap.router.errors import InvalidApiKeyError

API_KEY_REFUSAL: Final = "send a valid API key as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'"


def presented_key(field: Callable[[bytes], bytes | None]) -> bytes:
    """The key that a request sends as ``Authorization: Bearer KEY``, else as Anthropic's ``x-api-key: KEY``; empty
    without any. ``field`` gives the value of the field of a (lower-case) name, in the bytes that were sent."""
    scheme, _, key = (field(b"authorization") or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = field(b"x-api-key") or b""
    return key.strip()


class ApiKeys:
    """The keys that give access, compared in constant time. Without keys access is open."""

    def __init__(self, keys: Iterable[str], *, refusal: str = API_KEY_REFUSAL) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._refusal = refusal

    def __bool__(self) -> bool:
        return bool(self._keys)

    def knows(self, key: bytes) -> bool:
        matches = [hmac.compare_digest(key, known) for known in self._keys]  # all of them: no early exit
        return any(matches)

    def check(self, field: Callable[[bytes], bytes | None]) -> None:
        """Look at the key of a request, see ``presented_key``.

        Raises:
            InvalidApiKeyError: there are keys, and none of them was sent.
        """
        if not self._keys:
            return
        if not self.knows(presented_key(field)):
            raise InvalidApiKeyError(self._refusal)
