"""A store whose wall clock can be set while it runs, by a few lines of C that are preloaded into its server."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import struct
from pathlib import Path

from dualmap.statestore.embedded import server_binary

_SOURCE = Path(__file__).with_suffix(".c")


class StoreClock:
    """The clock of a store's server, ahead of the machine's or behind it. Its files are in ``directory``.

    ``server`` is the executable that starts such a store; None where this machine has no C compiler.
    """

    def __init__(self, directory: Path) -> None:
        self.server: Path | None = None
        self._directory = directory
        self._ahead = directory / "store-clock-ahead"
        self._ahead_us = 0

    async def build(self) -> None:
        """Make the executable, if there is a compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return
        library = self._directory / "store-clock.so"
        command = (compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE), "-ldl")
        compiling = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
        if await compiling.wait():
            return
        self._ahead.write_bytes(bytes(8))
        wrapper = self._directory / "store-server"
        preload = {"LD_PRELOAD": str(library), "STORE_CLOCK_AHEAD": str(self._ahead)}
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in preload.items())
        wrapper.write_text(f'#!/bin/sh\nexec env {words} {shlex.quote(str(server_binary()))} "$@"\n')
        wrapper.chmod(0o700)
        self.server = wrapper

    def jump(self, seconds: float) -> None:
        """Set the clock forward; with a negative number back."""
        self._ahead_us += int(seconds * 1e6)
        with self._ahead.open("r+b") as ahead:  # in place: the server has mapped it
            ahead.write(struct.pack("=q", self._ahead_us))
