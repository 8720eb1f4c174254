"""Calls of one turn of the event loop that share a script: it reads what they have in common once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Turn(Generic[Asked, Answer]):
    """Collects what is asked until the turn ends."""

    def __init__(self, run: Callable[[Sequence[Asked]], Awaitable[Sequence[Answer]]], at_most: int) -> None:
        """``run`` gives an answer to each of what it is given, in order: ``at_most`` at once."""
        self._run = run
        self._at_most = at_most
        self._waiting: list[tuple[Asked, asyncio.Future[Answer]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._is_alone = False
        """A call of one is under way, which did not wait for others."""

    async def ask(self, asked: Asked) -> Answer:
        """The answer. Asked at once where no call is under way: an idle server need not wait for the turn's end."""
        if self._is_alone or self._waiting or self._calls:
            return await self.add(asked)
        self._is_alone = True
        try:
            return (await self._run((asked,)))[0]
        finally:
            self._is_alone = False

    def add(self, asked: Asked) -> asyncio.Future[Answer]:
        """The future gets the answer."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)
        answered = loop.create_future()
        self._waiting.append((asked, answered))
        return answered

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), self._at_most):
            call = asyncio.create_task(self._call(waiting[first : first + self._at_most]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, waiting: Sequence[tuple[Asked, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._run([asked for asked, _ in waiting])
        except Exception as error:
            for _, answered in waiting:
                if not answered.done():
                    answered.set_exception(error)
            return
        for (_, answered), answer in zip(waiting, answers, strict=True):
            if not answered.done():
                answered.set_result(answer)
