"""How a pool talks to its server: commands, transactions and scripts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from statestore.pool.replies import ScriptMissingError
from statestore.pool.scripts import Script

Argument = bytes | str | int | float
Command = Sequence[Argument]

OwnClock = Callable[[], int]
"""Milliseconds; replaces the server's clock, so that stores can be driven in lockstep and in virtual time."""


class Calls(ABC):
    """Each raises StoreUnavailableError without a connection or without an answer in time, and StoreError where the
    server refuses (``statestore.pool.replies``)."""

    def __init__(self, scripts: Mapping[str, Script], own_clock: OwnClock | None) -> None:
        self._scripts = scripts
        self._own_clock = own_clock

    @abstractmethod
    def another(self) -> Calls:
        """The same over another connection."""

    @abstractmethod
    def command(self, *arguments: Argument, timeout_s: float | None = None) -> Awaitable[Any]:
        """Send a command; the awaitable gives the reply as the server sent it. ``timeout_s`` is for one that waits at
        the server: it needs ``Calls`` of its own, as those behind it wait too."""

    @abstractmethod
    async def together(self, commands: Sequence[Command]) -> list[Any]:
        """Run commands as one transaction: nothing comes between them."""

    @abstractmethod
    def listen(self, channel: bytes, deliver: Callable[[bytes], None]) -> None:
        """Hand on what is published there, from about now on and until it is closed. Some may be lost."""

    @abstractmethod
    def hang_up(self) -> None:
        """Drop the connection; calls in flight fail, and the next one connects again."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection for good; calls in flight fail."""

    async def script(self, name: str, base: bytes, *arguments: Argument) -> Any:
        """Run a script by its hash, or with its source where the server does not know it. ``base`` is what the keys of
        its pool begin with; ARGV[1] is put in front."""
        script = self._scripts[name]
        clock = "" if self._own_clock is None else self._own_clock()
        try:
            return await self.command("EVALSHA", script.sha, 1, base, clock, *arguments)
        except ScriptMissingError:
            await self.command("SCRIPT", "LOAD", script.source)  # so that it is never evicted
            # Scripts may be flushed again before the next call; the source works in any case.
            return await self.command("EVAL", script.source, 1, base, clock, *arguments)

    async def now_ms(self) -> int:
        """The store's time."""
        if self._own_clock is not None:
            return self._own_clock()
        seconds, microseconds = await self.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000
