"""Children that stopped answering are killed, so that their supervisor restarts them.

Replicas share one port, and the kernel also hands connections to one that hangs, for as long as its socket is open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import httpx

from dualmap.cli.processes import Child
from dualmap.runtime.trust import system_trust


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a child is checked, and how many checks in a row may stay unanswered: a count and not a time, as this
    process itself may have been suspended."""

    every_s: float = 1.0
    answer_within_s: float = 2.0
    questions: int = 3


_PATIENCE = Patience()


@contextlib.asynccontextmanager
async def hung_ones_killed(
    children: Iterable[Child], say: Callable[[str], None], patience: Patience = _PATIENCE
) -> AsyncIterator[None]:
    """Watch those of the children that have a ``health_url`` for the time of the context.

    An error is an answer, and so is a closed port: neither keeps a client waiting. A process that has never answered
    is left alone: it may take long to start, and does not listen before.
    """
    watches = [asyncio.create_task(_watch(child, say, patience)) for child in children if child.spec.health_url]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _watch(child: Child, say: Callable[[str], None], patience: Patience) -> None:
    pid, answered, silent = child.pid, False, 0
    limits = httpx.Limits(max_keepalive_connections=0)  # clients make new connections
    async with httpx.AsyncClient(
        timeout=patience.answer_within_s, limits=limits, verify=system_trust(), trust_env=False
    ) as client:
        while True:
            heard = await _probe(client, child.spec.health_url)
            if child.pid != pid:  # another process: the check counts for neither
                pid, answered, silent = child.pid, False, 0
            elif heard is None and answered:
                silent += 1
            else:
                answered, silent = answered or heard is True, 0
            if silent == patience.questions:
                say(f"{child.spec.name} has not answered for {silent * patience.answer_within_s:g} s and is killed")
                child.kill()
            if heard is not None:
                await asyncio.sleep(patience.every_s)


async def _probe(client: httpx.AsyncClient, url: str) -> bool | None:
    """True for an answer, False for a closed port, None for silence."""
    try:
        await client.get(url)
    except httpx.TimeoutException:
        return None
    except httpx.HTTPError:
        return False
    return True
