"""The order in which the requests of a replica that is gone are released."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class InOrder(Protocol):
    """A request that knows when it came."""

    @property
    def request_id(self) -> str: ...

    @property
    def sequence(self) -> int: ...


Request = TypeVar("Request", bound=InOrder)


def latest_first(requests: Iterable[Request]) -> list[Request]:
    """The order of reaping: who waits goes before who would make room for it, so that nobody is granted in vain."""
    return sorted(requests, key=lambda request: (request.sequence, request.request_id), reverse=True)
