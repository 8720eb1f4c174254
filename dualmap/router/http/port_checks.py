"""Whether the ports of instances refuse connections: checked for those whose begun answers have fallen silent.

A vLLM server that is stopping closes its port, and may leave streams that have begun open and silent.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dualmap.router.errors import OutOfFilesError
from dualmap.router.http.upstream_pool import ConnectError, UpstreamPool

FRESH_S: Final = 2.0
"""A result is valid this long; later callers cause another check."""


class PortChecks:
    """Connects in the background, one attempt at a time for a port."""

    def __init__(self, upstreams: UpstreamPool) -> None:
        self._upstreams = upstreams
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._found: dict[str, tuple[float, bool]] = {}

    def refuses(self, url: str) -> bool:
        """Whether the port refused a connection just now. False while that is unknown: call again. Never waits."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - FRESH_S
        checked_s, refused = self._found.get(url, (oldest_s, False))
        if checked_s > oldest_s:
            return refused
        if url not in self._under_way:
            self._found = {each: found for each, found in self._found.items() if found[0] > oldest_s}
            check = self._under_way[url] = loop.create_task(self._check(url), name=f"port check {url}")
            check.add_done_callback(lambda _: self._under_way.pop(url))
        return False

    async def _check(self, url: str) -> None:
        refused = False
        try:
            connection = await self._upstreams.connect(url)
            connection.abort()
        except ConnectError as error:
            refused = isinstance(error.__cause__, ConnectionRefusedError)
        except OutOfFilesError:
            pass  # no connection was tried
        self._found[url] = (asyncio.get_running_loop().time(), refused)

    def close(self) -> None:
        """End what is under way."""
        for check in self._under_way.values():
            check.cancel()
