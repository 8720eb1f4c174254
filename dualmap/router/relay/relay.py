"""The relay of a replica: streams are given to its thread, and come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

_log = logging.getLogger(__name__)


def _load() -> ModuleType | None:
    try:
        from dualmap.router.relay import _relay
    except ImportError:
        return None
    return _relay


NATIVE: Final[Any] = _load()
"""The extension; None where it is not built."""

KEEP: Final = 1
"""Keep the events, see ``event_log``."""
HIDE_IDS: Final = 2
"""Pass events on without the ids of their tokens."""
HIDE_USAGE: Final = 4
"""Return the stream at an event with a usage."""
EVENTS: Final = 8
"""Pass plain events alone, in chunks of the relay's own; else chunks as they come, if they end with an event's end and
have no usage that the kept end may cut."""
MESSAGES: Final = 16
"""The events are those of a message, of Anthropic's API."""
RESPONSES: Final = 32
"""The events are those of a response, of OpenAI's ``/v1/responses``."""


TAKEN: Final = 0
"""Reason: Python has taken the stream back."""
FULL: Final = 5
"""Reason: there is no room for what is kept of the stream."""

MAX_BYTES: Final = 96 << 10
"""Most bytes that the relay takes together with a stream."""


class Returned(NamedTuple):
    """A stream that was given back."""

    reason: int
    errno: int
    """Error of the instance's socket; 0: none."""
    unread: bytes
    """Bytes of the instance that were not passed on."""
    unsent: bytes
    """Bytes for the client that its socket did not take."""
    tail: bytes
    """The last bytes of the body that were passed on; all of them, if they are few."""
    log: bytes
    chunks: int
    """Number of chunks that were passed on."""
    outputs: int = 0
    """Number of events with output that were passed on."""


class Owner(Protocol):
    """The one who has given a stream to the relay."""

    def given_back(self, stream: Returned) -> None:
        """The stream is the owner's again."""


class Relay:
    """The streams that the relay has, of one event loop. Its thread is started for the first one. The caller must call
    ``close``.
    """

    def __init__(self, passed: Callable[[int], None]) -> None:
        """``passed`` is told how many chunks of a stream have passed, when it comes back."""
        self._passed = passed
        self._native: Any = None
        self._unusable = NATIVE is None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owners: dict[int, Owner] = {}

    def attach(
        self,
        owner: Owner,
        instance_file: int,
        client_file: int,
        flags: int,
        log_limit: int,
        data: bytes,
        mark: bytes = b"",
    ) -> int:
        """Give a stream to the relay, with the bytes of it that were read last. Returns its key; 0: it is not taken.
        ``mark``: what events with output have once, of a stream that passes without ``EVENTS``.

        Until it is given back, or taken, nothing may be read from the one descriptor or written to the other, and
        neither may be closed.
        """
        if self._native is None and not self._start():
            return 0
        key: int = self._native.attach(instance_file, client_file, flags, log_limit, data, mark)
        if key:
            self._owners[key] = owner
        return key

    def take(self, key: int) -> Returned | None:
        """Take a stream back; None: it is not there."""
        if self._owners.pop(key, None) is None:
            return None
        taken = self._native.take(key)
        return None if taken is None else self._counted(taken)

    def progressed(self, key: int) -> bool:
        """Whether bytes of the stream have come since the last call."""
        return self._native is not None and bool(self._native.progressed(key))

    @property
    def streams(self) -> int:
        """The number of streams that the relay has."""
        return len(self._owners)

    @property
    def chunks(self) -> int:
        """The number of chunks that have passed."""
        return 0 if self._native is None else int(self._native.counts()[1])

    def close(self) -> None:
        """Stop the thread. Streams that are still there are not given back."""
        native, self._native, self._unusable = self._native, None, True
        self._owners.clear()
        if native is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(native.fileno())
            native.close()

    def _start(self) -> bool:
        if self._unusable:
            return False
        loop = asyncio.get_running_loop()
        native: Any = None
        try:
            native = NATIVE.Relay()
            loop.add_reader(native.fileno(), self._collect)
        except (OSError, MemoryError, NotImplementedError) as error:
            if native is not None:
                native.close()
            _log.warning("the native relay cannot start, streams pass without it: %s", error)
            self._unusable = True
            return False
        self._native, self._loop = native, loop
        return True

    def _counted(self, stream: tuple[Any, ...]) -> Returned:
        returned = Returned(*stream)
        self._passed(returned.chunks)
        return returned

    def _collect(self) -> None:
        """Give back what the thread has returned."""
        for key, stream in self._native.returned():
            owner = self._owners.pop(key, None)
            if owner is None:
                continue
            try:
                owner.given_back(self._counted(stream))
            except Exception:  # one broken stream must not stop all others
                _log.exception("a stream of the relay failed")
