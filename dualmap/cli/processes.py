"""Child processes of a fleet on one machine: started, restarted with back-off, stopped within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dualmap.cli.errors import CommandError
from dualmap.cli.fleet_folder import write_pid
from dualmap.cli.parent import PARENT_PIPE_VARIABLE

_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 10.0
_HEALTHY_AFTER_S = 30.0
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child and its arguments. Stages stop one after another, lowest first."""

    name: str
    arguments: tuple[str, ...]
    stop_stage: int
    health_url: str = ""
    """The URL that it answers as long as it works; empty if none."""
    restart_after_s: float = _FIRST_DELAY_S
    """Time until it is started again for the first time."""


class Process(Protocol):
    """A process, as far as its supervisor uses one: ``asyncio.subprocess.Process``, or a fork."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Starter(Protocol):
    """How children are started. They end with it, however it ends, and sit in sessions of their own, so a Ctrl-C in the
    terminal reaches only this process, which then stops them in order."""

    @property
    def ended(self) -> asyncio.Event:
        """Set once it can start no other child, and all that it started have ended."""
        ...

    async def start(self, words: Sequence[str], log: Path) -> Process:
        """A process that runs these words, and prints to the end of ``log``."""
        ...

    def close(self) -> None:
        """Start no more; those that still run end."""
        ...


class Commands:
    """Starts each child as a command: ``command`` with its words.

    ``-P`` keeps the current folder off the module path, where a file of the user's, such as click.py, would be taken
    for the package of that name.
    """

    def __init__(
        self, environment: Mapping[str, str], command: Sequence[str] = (sys.executable, "-P", "-m", "dualmap")
    ) -> None:
        self._command = tuple(command)
        self._read_end, self._write_end = os.pipe()
        self._environment = {**environment, PARENT_PIPE_VARIABLE: str(self._read_end)}
        self.ended = asyncio.Event()

    async def start(self, words: Sequence[str], log: Path) -> Process:
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                *self._command,
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self._environment,
                pass_fds=(self._read_end,),
                start_new_session=True,
            )

    def close(self) -> None:
        for descriptor in (self._read_end, self._write_end):
            with contextlib.suppress(OSError):
                os.close(descriptor)


@dataclass(slots=True)
class Child:
    """A child as it runs now."""

    spec: ChildSpec
    log: Path
    process: Process | None = None
    restarts: int = 0
    keeper: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def pid(self) -> int | None:
        running = self.process is not None and self.process.returncode is None
        return self.process.pid if running and self.process else None

    def kill(self) -> None:
        """End the process at once, if one runs."""
        if self.pid is not None and self.process is not None:
            self.process.kill()


class ProcessGroup:
    """The children of one fleet. In ``directory`` each has a ``NAME.log`` with what it prints and a ``NAME.pid``."""

    def __init__(self, directory: Path, starter: Starter, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._starter = starter
        self._say = say
        self._settled = False
        self.children: list[Child] = []

    async def start(self, spec: ChildSpec) -> Child:
        """Start a child and watch over it from now on."""
        child = Child(spec, self._directory / f"{spec.name}.log")
        self.children.append(child)
        await self._spawn(child)
        child.keeper = asyncio.create_task(self._keep(child), name=f"keep {spec.name}")
        return child

    def settled(self) -> None:
        """The fleet is up: from now on a child that ends is started again instead of failing the start."""
        self._settled = True

    def check(self) -> None:
        """Raises CommandError with the end of its log if a child ended before the fleet was up."""
        for child in self.children:
            if child.process is not None and child.process.returncode is not None and not self._settled:
                tail = "\n".join(f"  {line}" for line in log_tail(child.log))
                raise CommandError(f"{child.spec.name} {how_it_ended(child.process.returncode)}:\n{tail}")

    async def stop(self, stage_timeout_s: float, at_once: asyncio.Event) -> None:
        """Stop all children stage by stage; what has not ended after ``stage_timeout_s`` is killed.

        Once ``at_once`` is set, all that still run are killed without waiting.
        """
        for child in self.children:
            if child.keeper is not None:
                child.keeper.cancel()
        await asyncio.gather(*(child.keeper for child in self.children if child.keeper), return_exceptions=True)
        for stage in sorted({child.spec.stop_stage for child in self.children}):
            processes = [
                child.process
                for child in self.children
                if child.spec.stop_stage == stage and child.process and child.process.returncode is None
            ]
            await _end(processes, stage_timeout_s, at_once)
        self._starter.close()

    async def _spawn(self, child: Child) -> None:
        child.process = await self._starter.start(child.spec.arguments, child.log)
        write_pid(child.log.parent, child.log.stem, child.process.pid)

    async def _keep(self, child: Child) -> None:
        delay_s = child.spec.restart_after_s
        while child.process is not None:
            started_s = time.monotonic()
            code = await child.process.wait()
            if not self._settled or self._starter.ended.is_set():
                return
            if time.monotonic() - started_s > _HEALTHY_AFTER_S:
                delay_s = child.spec.restart_after_s
            self._say(f"{child.spec.name} {how_it_ended(code)}; starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _LONGEST_DELAY_S)
            child.restarts += 1
            await self._spawn(child)
            self._say(f"{child.spec.name} runs again, as process {child.pid}")


def how_it_ended(code: int) -> str:
    """The end of a process by its return code; a negative one is the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


async def _end(processes: Sequence[Process], timeout_s: float, at_once: asyncio.Event) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    ended: asyncio.Future[Any] = asyncio.gather(*(process.wait() for process in processes))
    hurried: asyncio.Future[Any] = asyncio.create_task(at_once.wait())
    try:
        await asyncio.wait({ended, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
    await ended


def log_tail(log: Path) -> list[str]:
    """The last lines of a child's log."""
    with contextlib.suppress(OSError):
        return log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
    return []
