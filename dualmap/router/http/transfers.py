"""Transfers of KV that outlive their client: a connector frees staged KV only when a decoder has taken it over.

Without this, a client that leaves between the legs would leave the KV of its prompt on the prefill instance until the
connector's timeout, minutes later; and a decode leg that is aborted while its KV is being transferred may never notify
the prefill instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from dualmap.router.http.answer_driver import AnswerDriver
from dualmap.router.http.body_edits import BodyPart
from dualmap.router.http.upstream_pool import ConnectError, UpstreamPool

_log = logging.getLogger(__name__)

FREE_WITHIN_S: Final = 30.0
"""A decoder with a long queue takes longer; the connector's own timeout frees what is left."""
PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses before each round of tries to free staged KV."""
PREFILL_WITHIN_S: Final = 2.0
"""A prefill whose client has left may end within this time, and is stopped then: what it stages at the moment of a
disconnect could not be freed."""
MOST: Final = 512
"""Most takeovers under way at a time; more are left to the connector's timeout."""


Try = tuple[str, Callable[[], list[BodyPart]]]
"""A URL, and the request to send there."""


Staged = Callable[[bytes], Callable[[], Sequence[Try]] | None]
"""Tries by the body of a prefill leg's answer; None where nothing is staged."""


class Transfers:
    """Takeovers of staged KV on one replica."""

    def __init__(self, upstreams: UpstreamPool) -> None:
        self._upstreams = upstreams
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def wait_out(self, leg: AnswerDriver, tries: Callable[[], Sequence[Try]]) -> None:
        """A decode leg was sent, and its client has left: close its connection once its first token has come, since
        the decoder has the KV then. The head of a stream may come before. If it fails, ``free`` follows."""
        if not self._start(self._await_first_token(leg, tries)):
            leg.abort()

    def free_late(self, leg: AnswerDriver, staged: Staged) -> None:
        """A prefill leg was sent, and its client has left: free what it stages before it can be stopped. Only its
        answer says what that is."""
        if not self._start(self._await_late_answer(leg, staged)):
            leg.abort()

    def free(self, tries: Callable[[], Sequence[Try]]) -> None:
        """No decode leg took the KV over: try these, which have no client, until one does. They are made again after a
        pause: decoders that are away may come back."""
        self._start(self._free(tries))

    def _start(self, work: Coroutine[Any, Any, None]) -> bool:
        # The number is bounded: instances that hang would otherwise collect tasks and connections without end.
        if len(self._tasks) >= MOST:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _await_first_token(self, leg: AnswerDriver, tries: Callable[[], Sequence[Try]]) -> None:
        done, result = leg.go_on_alone(), None
        try:
            async with asyncio.timeout(FREE_WITHIN_S):
                result = await done
        except TimeoutError:
            _log.warning("a decode leg without a client did not begin its answer within %g s", FREE_WITHIN_S)
        finally:
            leg.abort()
        if result is not None and (result.failure is not None or result.status >= 400):
            await self._free(tries)

    async def _await_late_answer(self, leg: AnswerDriver, staged: Staged) -> None:
        done = leg.go_on_alone()
        try:
            await asyncio.wait({done}, timeout=PREFILL_WITHIN_S)
            if not done.done() and leg.connection.end_writing():
                await asyncio.wait({done}, timeout=PREFILL_WITHIN_S)
        finally:
            leg.abort()
        if (tries := staged(leg.machine.held_body)) is not None:
            await self._free(tries)

    async def _free(self, tries: Callable[[], Sequence[Try]]) -> None:
        for pause_s in PAUSES_S:
            await asyncio.sleep(pause_s)
            for url, parts in tries():
                try:
                    async with asyncio.timeout(FREE_WITHIN_S):
                        if await self._send(url, parts):
                            return
                except TimeoutError:
                    _log.warning("%s took over no KV within %g s", url, FREE_WITHIN_S)
                    return

    async def _send(self, url: str, parts: Callable[[], list[BodyPart]]) -> bool:
        """Whether there is nothing more to try: it was taken over, or is refused everywhere."""
        connection = None
        try:
            connection = await self._upstreams.connect(url)
            connection.start(parts())
            driver = AnswerDriver(connection)
            connection.answer_to(driver)
            result = await driver.done
        except ConnectError:
            return False
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self._upstreams.release(connection)
        return result.is_from_instance and result.status < 500

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
