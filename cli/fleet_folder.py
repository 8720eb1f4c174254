"""The folder of a running fleet: its settings, its children's logs and process ids, its store's socket.

A file in it stays locked for as long as its owner lives, however the owner ends. A folder whose lock is free is what
a killed owner left behind; one without a lock was kept for its logs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
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


def fleet_of_this_machine() -> tuple[Path | None, str]:
    """The settings file of the fleet that a command means that names none, and what to say where the command fails."""
    fleets = running_fleets()
    if not fleets:
        return None, "no fleet of 'dualmap up' runs on this machine; name one with --config FILE or --store.url URL"
    others = "".join(f"\n  --config {other}" for other in fleets[1:])
    return fleets[0], f"the fleet of {fleets[0]} is meant" + (f"; others run:{others}" if others else "")


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
