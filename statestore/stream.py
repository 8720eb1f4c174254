"""A stream of a store's messages, until its reader closes it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Stream(Protocol[T_co]):
    """An iterator that is endless until closed."""

    def __aiter__(self) -> AsyncIterator[T_co]: ...

    async def __anext__(self) -> T_co: ...

    async def aclose(self) -> None:
        """Stop listening. A reader that waits for the next message gets the end of the iteration."""
