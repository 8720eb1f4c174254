"""The private store of a fleet on one machine: started again, empty, on the same port if it dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from cli.errors import CommandError
from statestore.embedded import EmbeddedValkey
from statestore.errors import StoreError

_LOOK_EVERY_S = 0.25
_LONGEST_SOCKET_PATH = 103
"""Bytes that every platform takes; in a deeper folder the port has to do."""


@contextlib.asynccontextmanager
async def private_store(port: int, directory: Path, say: Callable[[str], None]) -> AsyncIterator[EmbeddedValkey]:
    """A running store, kept running for the time of the context; its socket and its pid file are in ``directory``.

    Raises:
        CommandError: it does not start.
    """
    path, pid_file = directory / "store.sock", directory / "store.pid"
    valkey = EmbeddedValkey(port=port, unix_socket=path if len(bytes(path)) <= _LONGEST_SOCKET_PATH else None)
    try:
        await asyncio.to_thread(_start, valkey, pid_file)
    except StoreError as error:
        raise CommandError(str(error)) from error
    keeper = asyncio.create_task(_keep(valkey, pid_file, say), name="keep store")
    try:
        yield valkey
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        await asyncio.to_thread(valkey.stop)


def _start(valkey: EmbeddedValkey, pid_file: Path) -> None:
    valkey.start()
    pid_file.write_text(f"{valkey.server_pid}\n", encoding="ascii")


async def _keep(valkey: EmbeddedValkey, pid_file: Path, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if valkey.running:
            continue
        say("the store ended; starting an empty one in its place")
        try:
            await asyncio.to_thread(valkey.stop)
            await asyncio.to_thread(_start, valkey, pid_file)
        except StoreError as error:
            say(f"the store does not start: {error}")
