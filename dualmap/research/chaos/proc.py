"""The process at the other end of a local connection, from ``/proc``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_ESTABLISHED = "01"


def owns_connection(pids: Iterable[int], port: int, to_port: int) -> bool:
    """Whether one of the processes has an established IPv4 connection from this port of its own to that other one."""
    inode = _inode_of(port, to_port)
    return inode is not None and any(_holds(pid, f"socket:[{inode}]") for pid in pids)


def open_files(pid: int) -> int:
    """Open file descriptors of a process; 0 once it is gone."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB; 0 once it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _inode_of(port: int, to_port: int) -> str | None:
    ends = f":{port:04X}", f":{to_port:04X}"  # one port may have connections to several others
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == _ESTABLISHED and fields[1].endswith(ends[0]) and fields[2].endswith(ends[1]):
            return fields[9]
    return None


def _holds(pid: int, target: str) -> bool:
    with contextlib.suppress(OSError):  # the process ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed
                if str(descriptor.readlink()) == target:
                    return True
    return False
