"""Processes of tests that start in milliseconds, as forks of one that has imported their modules.

Some tests start commands as their users do; others need not prove again that a module can be imported.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dualmap.cli.fork_server import ForkedProcess, ForkServer, serve_forks
from dualmap.cli.parent import PARENT_PIPE_VARIABLE

_SOURCE = """
import os, socket, sys
sys.path[:0] = {path!r}
from tests.support.fork_servers import serve_forks
from {module} import {function} as run
serve_forks(socket.socket(fileno={descriptor}), {modules!r}, dict(os.environ), run)
"""
_COMMANDS = (
    "uvloop",
    "dualmap.cli.up",
    "dualmap.cli.replay",
    "dualmap.cli.serve_emulator",
    "dualmap.cli.serve_picker",
    "dualmap.cli.serve_router",
    "dualmap.cli.serve_worker",
    "dualmap.router.serving.picker_door",
    "dualmap.router.serving.serve",
    "dualmap.simulation.emulator.serve",
    "dualmap.workers.serve",
)

__all__ = ["ForkedCommand", "executed_fork_server", "run_command", "serve_forks", "start_command"]


@contextlib.contextmanager
def executed_fork_server(run: str, modules: Sequence[str] = ()) -> Iterator[ForkServer]:
    """A fork server that is no fork of this process, which has threads. ``run`` is ``MODULE:FUNCTION``."""
    near, far = socket.socketpair()
    module, _, function = run.partition(":")
    source = _SOURCE.format(
        path=[str(Path(__file__).parents[2])],
        module=module,
        function=function,
        modules=tuple(modules),
        descriptor=far.fileno(),
    )
    command = [sys.executable, "-c", source]
    with near, subprocess.Popen(command, pass_fds=(far.fileno(),), stdin=subprocess.DEVNULL) as process:
        far.close()
        try:
            yield ForkServer(near)
        finally:
            process.kill()


class ForkedCommand:
    """A ``dualmap`` command that runs, with the methods of ``subprocess.Popen``."""

    def __init__(self, process: ForkedProcess, server: _Commands) -> None:
        self._process = process
        self._server = server

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        self._server.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        end_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("dualmap", timeout or 0.0)
            self._server.hear(0.02)
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()


class _Commands:
    """The fork server of this process's commands."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._lock = threading.Lock()  # tests start several at a time

    def start(self, words: Sequence[str], out: Path) -> ForkedCommand:
        with self._lock:
            process = self._server.order(words, out)
            while not process.started.is_set():
                self._server.receive()
        if process.failure is not None:
            raise process.failure
        return ForkedCommand(process, self)

    def hear(self, within_s: float) -> None:
        """Note what has started or ended."""
        with self._lock:
            if select.select([self._server], [], [], within_s)[0]:
                self._server.receive()


@functools.cache
def _commands() -> _Commands:
    import atexit

    open_until_exit = contextlib.ExitStack()
    atexit.register(open_until_exit.close)
    server = open_until_exit.enter_context(executed_fork_server(f"{__name__}:run_command", _COMMANDS))
    return _Commands(server)


def start_command(
    *words: str, out: Path, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> ForkedCommand:
    """Start ``dualmap`` with these words. Output and errors are appended to ``out``.

    Args:
        environment: its variables, by default those of this process.
        folder: its current folder, by default that of this process.
    """
    surroundings = {"environment": dict(environment or os.environ), "folder": str(folder or Path.cwd())}
    return _commands().start((json.dumps(surroundings), *words), out)


def start_program(source: str, *words: str, out: Path) -> ForkedCommand:
    """Start a program of Python with these arguments, as ``python -c`` does. What commands need is imported already."""
    surroundings = {"environment": dict(os.environ), "folder": str(Path.cwd()), "source": source}
    return _commands().start((json.dumps(surroundings), *words), out)


def run_command(words: Sequence[str]) -> int:
    """In the forked process: run what was started; returns the exit code."""
    from dualmap.cli.main import main

    surroundings = json.loads(words[0])
    parent_pipe = os.environ[PARENT_PIPE_VARIABLE]
    os.environ.clear()
    os.environ.update(surroundings["environment"], **{PARENT_PIPE_VARIABLE: parent_pipe})
    os.chdir(surroundings["folder"])
    tempfile.tempdir = None  # it follows from the environment
    sys.argv[1:] = words[1:]
    if "source" not in surroundings:
        return main(words[1:])
    exec(surroundings["source"], {"__name__": "__main__"})
    return 0
