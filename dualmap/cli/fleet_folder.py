"""The folder of a running fleet: its settings, its children's logs and process ids, its store's socket.

A file in it stays locked for as long as its owner lives, however the owner ends. A folder whose lock is free is what
a killed owner left behind; one without a lock was kept for its logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "dualmap-up-"
STORE_SOCKET = "store.sock"
CONFIG = "fleet.yaml"
"""The settings of its processes: other commands find the fleet by it."""
_LOCK = "lock"
_LONGEST_SOCKET_PATH = 103
"""Bytes that every platform takes."""
_SHORT = Path("/tmp")


@contextlib.contextmanager
def fleet_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder for the time of the context: in ``parent``, by default the user's folder for temporary files, or in
    /tmp where a socket's path would be too long. Folders that dead owners left there are removed.

    It goes at the end. After an exception it is kept, if anything is in it, and named on standard error.
    """
    parent = _fitting(parent or Path(tempfile.gettempdir()))
    remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    with _locked(folder):
        try:
            yield folder
        except BaseException:
            (folder / _LOCK).unlink()
            if any(folder.iterdir()):
                print(f"dualmap up: logs are in {folder}", file=sys.stderr)
            else:
                folder.rmdir()
            raise
        shutil.rmtree(folder, ignore_errors=True)


def write_pid(folder: Path, name: str, pid: int) -> None:
    """Keep a child's process id in ``NAME.pid``. A reader sees the former id or this one, whole."""
    new = folder / f"{name}.pid.new"
    new.write_text(f"{pid}\n", encoding="ascii")
    new.replace(folder / f"{name}.pid")


def running_fleets() -> list[Path]:
    """The settings files of this user's running fleets on this machine, that of the youngest first."""
    found: list[tuple[float, Path]] = []
    for folder in _fitting(Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it ends at this moment, or belongs to another user
            config = (folder / CONFIG).stat()
            if config.st_uid == os.getuid() and _is_locked(folder):
                found.append((config.st_mtime, folder / CONFIG))
    return [path for _, path in sorted(found, reverse=True)]


@dataclass(frozen=True, slots=True)
class FleetHere:
    """The fleet that a command means which names none: the youngest that runs on this machine."""

    config: Path | None
    """The settings file of the fleet; None if none runs."""
    if_failed: str
    """The sentence to add to the command's error."""
    choice: str = ""
    """Where several run: which one is meant, and how to choose another one. Empty if there is no choice."""
    all: str = ""
    """Where several run: what names each of them."""


def fleet_of_this_machine() -> FleetHere:
    """The fleet that a command means which names none."""
    fleets = running_fleets()
    if not fleets:
        return FleetHere(
            None, "no fleet of 'dualmap up' runs on this machine; name one with --config FILE or --store.url URL"
        )
    meant, *others = fleets
    if not others:
        return FleetHere(meant, f"the fleet of {meant} is meant")
    listed = "".join(f"\n  --config {other}   ({described(other)})" for other in others)
    choice = (
        f"{len(fleets)} fleets run on this machine, and this is the youngest ({described(meant)}). "
        f"Choose another one by:{listed}"
    )
    every = f"{len(fleets)} fleets run on this machine. Name one by:\n  --config {meant}   ({described(meant)}){listed}"
    return FleetHere(meant, f"the fleet of {meant} is meant", choice, every)


def described(config: Path) -> str:
    """A running fleet by its endpoint and its start, as far as they can be read."""
    try:
        started = time.strftime("%H:%M:%S", time.localtime(config.stat().st_mtime))
        router = json.loads(config.read_text("utf-8"))["router"]
        return f"port {router['port']}, started at {started}"
    except (OSError, ValueError, KeyError, TypeError):  # it ends at this moment, or is of another version
        return "ending"


def _is_locked(folder: Path) -> bool:
    with (folder / _LOCK).open("r+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def remove_abandoned(parent: Path) -> None:
    """Remove what fleets of this user left behind when they were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        # An OSError means that it is locked, has no lock, or belongs to another user.
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _fitting(parent: Path) -> Path:
    longest = parent / f"{PREFIX}12345678" / STORE_SOCKET
    return parent if len(bytes(longest)) <= _LONGEST_SOCKET_PATH else _SHORT


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The lock is taken before the file has its name: otherwise it could be taken for one that was left behind.
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(folder / _LOCK)
        yield
