"""First tokens and ends of requests: those of one turn of the event loop in one call, which reads and writes each of
their instances once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from statestore.base import Transition
from statestore.redis.calls import Argument
from statestore.redis.codec import transition_from

MAX_RELEASES = 64
"""Requests in one call at most: a script stops everything else."""

Release = tuple[Argument, Argument, Argument, Argument, Argument]
"""What ``release_requests`` takes of one request."""


class Releases:
    """Collects them until the turn ends."""

    def __init__(self, run: Callable[..., Awaitable[list[Any]]]) -> None:
        """``run`` is given one release after another."""
        self._run = run
        self._waiting: list[tuple[Release, asyncio.Future[Transition]]] = []
        self._calls: set[asyncio.Task[None]] = set()

    def add(self, release: Release) -> asyncio.Future[Transition]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        done = loop.create_future()
        self._waiting.append((release, done))
        return done

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MAX_RELEASES):
            call = asyncio.create_task(self._call(waiting[first : first + MAX_RELEASES]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, releases: list[tuple[Release, asyncio.Future[Transition]]]) -> None:
        try:
            replies = await self._run(*[part for release, _ in releases for part in release])
        except Exception as error:
            for _, done in releases:
                if not done.done():
                    done.set_exception(error)
            return
        for (_, done), reply in zip(releases, replies, strict=True):
            if not done.done():
                done.set_result(transition_from(reply))
