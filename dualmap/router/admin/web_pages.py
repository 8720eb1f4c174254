"""Which web pages may call the paths of operators while these need no key.

A browser sends requests for any page that it shows, to any address that it reaches: a page from elsewhere could drain
instances by a form. It cannot send a key that it does not know, so this is judged only where no key is needed. Two
facts of a request tell such a page: what the browser says of its origin, and a host name that is not the replica's
(the page's own name, made to point at the replica's address: DNS rebinding). Clients other than browsers send no origin
and use an address or a name of the replica.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from typing import Final
from urllib.parse import SplitResult, urlsplit

from dualmap.router.errors import ForeignPageError
from dualmap.router.settings import RouterSettings

_INNER_DOMAINS: Final = (".localhost", ".internal", ".svc", ".cluster.local")
"""Domains that nobody can register."""
_OWN_SITES: Final = frozenset({b"same-origin", b"none"})
_PORTS: Final = {"http": 80, "https": 443}


class PageRule:
    """The rule of one replica."""

    def __init__(self, router: RouterSettings, advertised_url: str = "") -> None:
        own = (router.host, socket.gethostname(), urlsplit(advertised_url).hostname or "")
        self._proxies = {host.lower().rstrip(".") for host in router.admin_hosts}
        self._hosts = self._proxies | {host.lower().rstrip(".") for host in own}

    def check(self, method: str, field: Callable[[bytes], bytes | None]) -> None:
        """``field`` gives the value of a header field by its name, in lower case.

        Raises:
            ForeignPageError: a page from elsewhere sends the request, or may do so.
        """
        host, origin = field(b"host"), field(b"origin")
        own = None if host is None else _split("//" + host.decode("latin-1"))
        if host is not None and not self._has(own):
            raise ForeignPageError(
                f"{host.decode('latin-1')!r} is no name of this replica that it knows, so a web page from elsewhere may"
                " have sent this: add the name to router.admin_hosts, or close /admin by router.admin_key"
            )
        if origin is not None and not self._is_own_page(origin, own):
            raise ForeignPageError(
                f"a web page of {origin.decode('latin-1')!r} sends this: without router.admin_key, only pages of this"
                " replica may call what is for operators; behind a proxy, add its name to router.admin_hosts"
            )
        site = field(b"sec-fetch-site")
        if site is not None and site not in _OWN_SITES and not _follows_link(method, field):
            raise ForeignPageError(
                "a web page from elsewhere sends this: without router.admin_key, only pages of this replica may call"
                " what is for operators"
            )

    def _has(self, authority: SplitResult | None) -> bool:
        """Whether nobody else can have the host as the name of a page: an address, a name without a domain, one of a
        domain that cannot be registered, or a name of this replica."""
        name = _name(authority)
        return bool(name) and (
            "." not in name or name in self._hosts or name.endswith(_INNER_DOMAINS) or _is_address(name)
        )

    def _is_own_page(self, origin: bytes, own: SplitResult | None) -> bool:
        """Whether the page has the origin of this replica, which a browser has reached at ``own``, or of its proxy."""
        page = _split(origin.decode("latin-1"))
        if page is None or not (name := _name(page)):  # null: the page hides where it is from
            return False
        usual = _PORTS.get(page.scheme)
        if own is not None and (_name(own), own.port or usual) == (name, page.port or usual):
            return True
        return name in self._proxies


def _split(url: str) -> SplitResult | None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _name(authority: SplitResult | None) -> str:
    return "" if authority is None else (authority.hostname or "").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _follows_link(method: str, field: Callable[[bytes], bytes | None]) -> bool:
    """Whether a person follows a link to here: that changes nothing, and the page with the link reads nothing."""
    return (
        method in ("GET", "HEAD")
        and field(b"sec-fetch-mode") == b"navigate"
        and field(b"sec-fetch-dest") == b"document"
    )
