"""CORS: which pages of other origins may call inference and the list of models from a browser, and read the answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dualmap.router.http.heads import FLEET_FIELDS
from dualmap.router.http.paths import needs_api_key
from dualmap.router.http.plain_heads import Header
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.tenants.rate_limits import LIMIT_FIELDS

_ANY: Final = "*"
_READABLE: Final = b", ".join(sorted([b"retry-after", b"x-request-id", *FLEET_FIELDS, *LIMIT_FIELDS]))
_PREFLIGHT_KEPT_S: Final = b"600"
_VARY: Final = (b"vary", b"origin")


class CorsRule:
    """``router.cors_origins`` as header fields."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = _ANY.encode() in self._origins

    def fields(self, request: ClientRequest) -> list[Header]:
        """The header fields of an answer for the browser; for a preflight request, what it may send."""
        origin = request.get(b"origin")
        if origin is None or not needs_api_key(request.path):
            return []
        if not self._any and origin not in self._origins:
            return [_VARY]
        fields: list[Header] = [(b"access-control-allow-origin", b"*" if self._any else origin)]
        if not self._any:
            fields.append(_VARY)
        if request.method == "OPTIONS":
            fields += [
                (b"access-control-allow-methods", b"GET, POST, DELETE"),
                (b"access-control-allow-headers", request.get(b"access-control-request-headers") or b"*"),
                (b"access-control-max-age", _PREFLIGHT_KEPT_S),
            ]
        else:
            fields.append((b"access-control-expose-headers", _READABLE))
        return fields
