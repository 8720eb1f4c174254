"""Small HTTP calls of the commands to their own fleet: no connection pool, no proxy, no redirects elsewhere."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dualmap.runtime.trust import system_trust


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Status 0 means that there was no answer."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON; None when it is not JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def fetch(
    url: str,
    *,
    method: str = "GET",
    body: Mapping[str, Any] | None = None,
    key: str | None = None,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
    fields: Mapping[str, str] | None = None,
) -> HttpReply:
    """One request; every HTTP status is an answer, and so is no answer. ``tls``: where more is trusted than the system
    does. ``fields`` are further ones of its head."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        return HttpReply(0, b"a user and a password in a URL are not used")
    headers = {"accept": "*/*", **(fields or {})}
    if body is not None:
        headers["content-type"] = "application/json"
    if key:
        headers["authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data=data, headers=headers, method=method)
    secure = [urllib.request.HTTPSHandler(context=tls or system_trust())] if url.startswith("https:") else []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), *secure)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return HttpReply(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return HttpReply(error.code, error.read())
    except OSError as error:
        return HttpReply(0, str(getattr(error, "reason", error)).encode())
