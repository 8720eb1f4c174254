"""The private store of a fleet on one machine: started again, empty, on the same socket if it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from dualmap.cli.errors import CommandError
from dualmap.cli.fleet_folder import STORE_SOCKET, write_pid
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import StoreError

_LOOK_EVERY_S = 0.25


@contextlib.asynccontextmanager
async def private_store(directory: Path, say: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of a running store, kept running for the time of the context; its socket, which is open to this user
    alone, and its pid file are in ``directory``.

    Raises:
        CommandError: it does not start.
    """
    valkey = EmbeddedValkey(unix_socket=directory / STORE_SOCKET)
    try:
        await asyncio.to_thread(_start, valkey, directory)
    except StoreError as error:
        raise CommandError(str(error)) from error
    keeper = asyncio.create_task(_keep(valkey, directory, say), name="keep store")
    try:
        yield valkey.url
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await asyncio.to_thread(valkey.stop)


def _start(valkey: EmbeddedValkey, directory: Path) -> None:
    valkey.start()
    write_pid(directory, "store", valkey.server_pid)


async def _keep(valkey: EmbeddedValkey, directory: Path, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if valkey.running:
            continue
        say("the store ended; starting an empty one in its place")
        try:
            await asyncio.to_thread(valkey.stop)
            await asyncio.to_thread(_start, valkey, directory)
        except StoreError as error:
            say(f"the store does not start: {error}")
