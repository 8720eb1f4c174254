"""A process that has imported what the other processes of a fleet need, and forks each of them.

Modules are most of the work of a start, and most of a process's memory: forks have both already, and share the memory
for as long as they do not write to it.

A fork is safe in a process of one thread, without an event loop or a connection. This one imports, waits for orders on
a socket, and does nothing else. It ends when the other end of the socket is closed, and the processes that it forked
end with it (``dualmap.cli.parent``).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dualmap.cli.errors import CommandError
from dualmap.cli.parent import PARENT_PIPE_VARIABLE
from dualmap.runtime.collector import uncollected
from dualmap.runtime.trust import system_trust

_COMMAND = (sys.executable, "-m", "dualmap")
_READ_BYTES = 1 << 16
_ARGUMENTS_AT = 45
"""The place of ``arg_start`` in /proc/PID/stat behind the name of the process; ``env_end`` is the third after it."""


def can_fork() -> bool:
    """Whether this process may be forked: on Linux, as system libraries of macOS do not survive it, and while it has
    one thread."""
    return sys.platform == "linux" and len(list(Path("/proc/self/task").glob("*"))) == 1


class ForkedProcess:
    """A process that a fork server started, as the server reports it."""

    def __init__(self, send_signal: Callable[[int, int], object]) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.failure: OSError | None = None
        """Why there is no such process."""
        self.started = asyncio.Event()
        """The server has answered the order."""
        self._ended = asyncio.Event()
        self._send_signal = send_signal

    def note_start(self, pid: int, failure: OSError | None = None) -> None:
        self.pid, self.failure = pid, failure
        self.started.set()

    def note_end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        """The exit code, once it has ended; negative for the signal that killed it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Have the server send it a signal, which the server knows not to reach another process of the same id."""
        if self.returncode is None:
            self._send_signal(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The near end of a fork server. ``receive`` reads what it reports, and is to be called when there is something to
    read; ``start`` sees to that itself, within an event loop."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._unread = b""
        self._ordered: list[ForkedProcess] = []
        self._living: dict[int, ForkedProcess] = {}
        self._watched = False
        self.ended = asyncio.Event()
        """The server is gone, and with it all that it started."""

    def fileno(self) -> int:
        return self._control.fileno()

    async def start(self, words: Sequence[str], log: Path) -> ForkedProcess:
        """A process that runs these words, and prints to the end of ``log``. It is in a session of its own.

        Raises:
            OSError: the system allows no other process.
            CommandError: the server has ended.
        """
        process = self.order(words, log)
        if not self._watched:
            asyncio.get_running_loop().add_reader(self._control, self.receive)
            self._watched = True
        await process.started.wait()
        if process.failure is not None:
            raise process.failure
        return process

    def order(self, words: Sequence[str], log: Path) -> ForkedProcess:
        """The same, without waiting until it has started. Raises CommandError: the server has ended."""
        process = ForkedProcess(lambda pid, number: self._send({"signal": number, "pid": pid}))
        if not self._send({"words": list(words), "log": str(log)}):
            raise CommandError("the process that starts the other ones has ended")
        self._ordered.append(process)
        return process

    def receive(self) -> None:
        """Read what the server reports."""
        if not (read := _received(self._control)):
            self._note_end()
            return
        *lines, self._unread = (self._unread + read).split(b"\n")
        for report in map(json.loads, lines):
            if "code" in report:
                self._living.pop(report["pid"]).note_end(report["code"])
            elif "errno" in report:
                self._ordered.pop(0).note_start(0, OSError(report["errno"], os.strerror(report["errno"])))
            else:
                self._living[report["pid"]] = self._ordered.pop(0)
                self._living[report["pid"]].note_start(report["pid"])

    def close(self) -> None:
        """Let the server end, and with it what still runs. The event loop, if there is one, must be the one of
        ``start``."""
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._control)
            self._watched = False
        self._control.close()

    def _note_end(self) -> None:
        self.close()
        for process in self._ordered:
            process.note_start(0, OSError("the process that starts the other ones has ended"))
        for process in self._living.values():
            process.note_end(-signal.SIGTERM)  # which they get when its pipe closes
        self._ordered.clear()
        self._living.clear()
        self.ended.set()

    def _send(self, order: Mapping[str, Any]) -> bool:
        if self.ended.is_set():
            return False
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            self._note_end()
        return not self.ended.is_set()


@contextlib.contextmanager
def fork_server(
    modules: Sequence[str], environment: Mapping[str, str], run: Callable[[Sequence[str]], int]
) -> Iterator[ForkServer]:
    """A fork server for the time of the context: a fork of this process, which must be one that can be.

    Args:
        modules: what it imports before it starts others.
        environment: variables of those that it starts.
        run: runs the words of one, in it, and returns its exit code.
    """
    near, far = socket.socketpair()
    _flush()
    if not (pid := os.fork()):
        near.close()
        os.setsid()  # Ctrl-C in the terminal reaches the supervisor alone
        serve_forks(far, modules, environment, run)
    far.close()
    try:
        yield ForkServer(near)
    finally:
        near.close()
        os.kill(pid, signal.SIGKILL)  # it may be importing, and not see yet that the socket is closed
        os.waitpid(pid, 0)


def serve_forks(
    control: socket.socket, modules: Iterable[str], environment: Mapping[str, str], run: Callable[[Sequence[str]], int]
) -> NoReturn:
    """Be a fork server until ``control`` is closed at its other end. Leaves by SystemExit in each process that it
    forks, once that is done; in the server itself the process ends here."""
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    server = _Server(control)
    os.environ.clear()
    os.environ.update(environment, **{PARENT_PIPE_VARIABLE: str(server.parent_pipe)})
    _show_as((*_COMMAND, "(starts the other processes)"))
    with uncollected():
        for module in modules:
            importlib.import_module(module)
        system_trust()
    gc.collect()
    gc.freeze()  # a collection in a fork would write to each object, and so make the memory its own
    words = server.serve_until_forked()
    if words is None:
        os._exit(0)
    raise SystemExit(run(words))


class _Server:
    """The far end: starts what is ordered, reports starts and ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._unread = b""
        self._living: set[int] = set()
        self.parent_pipe, self._held = os.pipe()
        self._ends, self._ends_written = socket.socketpair()
        self._ends_written.setblocking(False)

    def serve_until_forked(self) -> list[str] | None:
        """The words to run, in a process that was forked; in this one, None at the end of all orders."""
        signal.set_wakeup_fd(self._ends_written.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._ends, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._ends in ready:
                    self._ends.recv(_READ_BYTES)
                    self._report_ends()
                if self._control not in ready:
                    continue
                if not (read := _received(self._control)):
                    return None
                *lines, self._unread = (self._unread + read).split(b"\n")
                for order in map(json.loads, lines):
                    if "signal" in order:
                        self._send_signal(order["pid"], order["signal"])
                    elif self._is_forked(order["words"], order["log"]):
                        words: list[str] = order["words"]
                        return words

    def _is_forked(self, words: Sequence[str], log: str) -> bool:
        """Whether this is the process that was started, and not the one that started it."""
        out = -1
        try:
            out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            pid = os.fork()
        except OSError as error:
            if out >= 0:
                os.close(out)
            self._report({"errno": error.errno})
            return False
        if not pid:
            self._separate(words, out)
            return True
        os.close(out)
        self._living.add(pid)
        self._report({"pid": pid})
        return False

    def _separate(self, words: Sequence[str], out: int) -> None:
        """Give this fork what a process has that was started by itself: a session, its own output, its words."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._control, self._ends, self._ends_written):
            each.close()
        os.close(self._held)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for opened, descriptor in ((nothing, 0), (out, 1), (out, 2)):
            os.dup2(opened, descriptor)
        os.close(nothing)
        os.close(out)
        sys.argv = [sys.argv[0], *words]
        _show_as((*_COMMAND, *words))

    def _send_signal(self, pid: int, number: int) -> None:
        self._report_ends()
        if pid in self._living:
            os.kill(pid, number)

    def _report_ends(self) -> None:
        for pid in list(self._living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._living.remove(pid)
                self._report({"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _report(self, report: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the other end is closed, which the next reading shows
            self._control.sendall(json.dumps(report).encode() + b"\n")


def _received(control: socket.socket) -> bytes:
    """What came since; nothing once the other end is closed."""
    try:
        return control.recv(_READ_BYTES)
    except OSError:
        return b""


def _show_as(words: Iterable[str]) -> None:
    """Have ``ps`` show these words. They are written where the kernel looks for them, over the words and, beyond these,
    the variables that the process was started with, which nothing reads any more: ``os.environ`` has been set since."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, _, _, end = map(int, stat[_ARGUMENTS_AT : _ARGUMENTS_AT + 4])
    if not start:  # this kernel keeps it to itself
        return
    shown = " ".join(words).encode(errors="surrogateescape")[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, shown, len(shown))


def _flush() -> None:
    """What is not written yet would be written by each fork too."""
    sys.stdout.flush()
    sys.stderr.flush()
