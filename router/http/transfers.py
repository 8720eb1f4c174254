"""Transfers of KV that outlive their client: a connector frees staged KV only when a decoder has taken it over.

Without this, a client that leaves between the legs would leave the KV of its prompt on the prefill instance until the
connector's timeout, minutes later; and a decode leg that is aborted while its KV is on the way may never tell the
prefill instance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from router.http.leg_answer import Unwanted
from router.http.model_field import BodyPart
from router.http.upstream import UpstreamConnection
from router.http.upstream_pool import ConnectError, UpstreamPool
from router.outcome import InstanceFailure

_log = logging.getLogger(__name__)

FREE_WITHIN_S: Final = 30.0
"""A decoder with a long queue takes longer; the connector's own timeout frees what is left."""
MOST: Final = 512
"""Under way at a time; more are left to the connector's timeout."""


class Transfers:
    """Those of one replica."""

    def __init__(self, upstreams: UpstreamPool) -> None:
        self._upstreams = upstreams
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def wait_out(self, connection: UpstreamConnection) -> None:
        """A decode leg was sent, and its client has left: close its connection once its first token has come, since
        the decoder has the KV then. The head of a stream may come before."""
        if not self._start(self._await_first_bytes(connection)):
            connection.abort()

    def free(self, tries: Sequence[tuple[str, Callable[[], list[BodyPart]]]]) -> None:
        """No decode leg was sent: have one take the KV over for nobody, at the first of these URLs that does."""
        self._start(self._free(tries))

    def _start(self, work: Coroutine[Any, Any, None]) -> bool:
        if len(self._tasks) >= MOST:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _await_first_bytes(self, connection: UpstreamConnection) -> None:
        sink = Unwanted(whole=False)
        connection.redirect(sink)
        try:
            async with asyncio.timeout(FREE_WITHIN_S):
                await sink.done
        except TimeoutError:
            _log.warning("a decode leg without a client did not begin its answer within %g s", FREE_WITHIN_S)
        finally:
            connection.abort()

    async def _free(self, tries: Sequence[tuple[str, Callable[[], list[BodyPart]]]]) -> None:
        for url, parts in tries:
            try:
                async with asyncio.timeout(FREE_WITHIN_S):
                    failure = await self._send(url, parts)
            except TimeoutError:
                _log.warning("%s took over no KV within %g s", url, FREE_WITHIN_S)
                return
            if failure is None:
                return

    async def _send(self, url: str, parts: Callable[[], list[BodyPart]]) -> InstanceFailure | None:
        sink, connection = Unwanted(whole=True), None
        try:
            connection = await self._upstreams.connect(url)
            connection.start(sink, parts())
            failure = await sink.done
        except ConnectError as error:
            return error.failure
        except BaseException:
            if connection is not None:
                connection.abort()
            raise
        self._upstreams.release(connection)
        return failure

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
