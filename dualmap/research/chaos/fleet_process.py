"""A running ``dualmap up`` as a process: started, read, its children found and signalled, stopped within a bound."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, Self

STOP_S = 20.0
"""Within this time a fleet stops by itself."""


class SomeProcess(Protocol):
    """A process, with the methods of ``subprocess.Popen`` that are used of a fleet's."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def kill(self) -> None: ...


class FleetProcess:
    """One ``dualmap up``, whose output goes to a file. Its addresses and its folder are known once it is ready."""

    def __init__(self, process: SomeProcess, output: Path) -> None:
        self.process = process
        self._output = output

    @classmethod
    def start(
        cls,
        directory: Path,
        options: Sequence[str],
        environment: Mapping[str, str] | None = None,
        fds: tuple[int, ...] = (),
    ) -> Self:
        """Start ``dualmap up`` with these options; its own folder, and its output, are in ``directory``.

        Args:
            environment: variables beside this process's own, of which none configures the fleet.
            fds: file descriptors that it inherits.
        """
        output = directory / "up.out"
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "dualmap", "up", *options],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=unconfigured() | {"TMPDIR": str(directory)} | dict(environment or {}),
                pass_fds=fds,
            )
        return cls(process, output)

    @property
    def output(self) -> str:
        """The text that it has printed. Raises AssertionError: it ended."""
        text = self._output.read_text()
        assert self.process.poll() is None, f"`dualmap up` ended:\n{text}"
        return text

    @property
    def is_ready(self) -> bool:
        return "Try it:" in self.output

    @cached_property
    def endpoint(self) -> str:
        return self._find(r"endpoint +(\S+)/v1")

    @cached_property
    def model(self) -> str:
        return self._find(r"model '([^']+)'")

    @cached_property
    def store_url(self) -> str:
        return self._find(r"store +(\S+)")

    @cached_property
    def directory(self) -> Path:
        """Where its children have their logs and process ids."""
        return Path(self._find(r"logs +(\S+)"))

    def pid(self, child: str) -> int:
        """Process id of a child as it runs now, for example of ``router-1``."""
        return int((self.directory / f"{child}.pid").read_text())

    def pids(self) -> dict[str, int]:
        return {path.stem: int(path.read_text()) for path in self.directory.glob("*.pid")}

    def kill(self, child: str) -> int:
        """kill -9; returns the id of the process that died."""
        pid = self.pid(child)
        os.kill(pid, signal.SIGKILL)
        return pid

    def stop(self) -> None:
        """Let it stop in order; kill it where it does not within ``STOP_S``. Raises subprocess.TimeoutExpired then."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                self.process.wait(STOP_S)
        finally:
            self.kill_all()

    def kill_all(self) -> None:
        """End it at once; its children end by themselves."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _find(self, pattern: str) -> str:
        text = self._output.read_text()
        found = re.search(pattern, text)
        assert found is not None, f"{pattern} is not in:\n{text}"
        return found[1]


def unconfigured() -> dict[str, str]:
    """This process's environment without what would configure a fleet."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DUALMAP_")}


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
