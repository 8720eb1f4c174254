"""How a pool talks to its server: commands, transactions and scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

Argument = bytes | str | int | float
Command = Sequence[Argument]
_WORDS_PER_COMMAND: Final = 1000
"""A script may give a command some thousand at most."""


def in_commands(begins: Command, words: Sequence[Argument]) -> list[Command]:
    """Commands that begin alike and take these words together."""
    firsts = range(0, len(words), _WORDS_PER_COMMAND)
    return [(*begins, *words[first : first + _WORDS_PER_COMMAND]) for first in firsts]


class Calls(ABC):
    """Each raises StoreUnavailableError without a connection or without an answer in time, and StoreError where the
    server refuses (``statestore.pool.replies``).

    Only scripts change state. A network may hold a call back and deliver it long after its caller gave it up: a script
    carries the time after which it must not act, and is refused then; a command cannot. So ``command`` and ``together``
    read. The one exception is BZPOPMIN of ``wanted_rebalances``: what it takes too late is a hint.
    """

    @abstractmethod
    def another(self) -> Calls:
        """Return these calls over another connection."""

    @abstractmethod
    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        """Send a command that reads; the awaitable gives the reply as the server sent it. ``timeout_s`` is for one that
        waits at the server: it needs ``Calls`` of its own, as those behind it wait too."""

    @abstractmethod
    async def script(self, name: str, base: bytes, *arguments: Argument) -> Any:
        """Run a script. ``base`` is what the keys of its pool begin with. Its clock (``shared/call.lua``) is put in
        front."""

    @abstractmethod
    async def now_ms(self) -> int:
        """The store's time."""

    @abstractmethod
    async def together(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands that read as one transaction: nothing comes between them."""

    @abstractmethod
    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        """Hand on what is published there, from about now on and until it is closed. Some may be lost."""

    @abstractmethod
    def hang_up(self) -> None:
        """Drop the connection; calls in flight fail, and the next one connects again."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection for good; calls in flight fail."""
