"""Memory and cores that this process may use: those of its container, where that has limits, or of the machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def memory_bytes(root: Path = _ROOT) -> int:
    """The least of the machine's memory and the limits of the control groups that this process is in."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder in _control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name)[:1] if word.isdecimal()]
    return min(limits)


def cores(root: Path = _ROOT) -> int:
    """The cores that this process may run on, or what the limits of its control groups leave of them, rounded up."""
    limits = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _control_groups(root, "cpu"):
        match _words(folder / "cpu.max"):
            case [quota, period] if quota.isdecimal():
                limits.append(int(quota) / int(period))
    return max(1, math.ceil(min(limits)))


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups of this process, from its own upwards: of version 2, and of version 1 for memory."""
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        top = mounted if not controllers else mounted / controller
        if controllers and controller not in controllers.split(","):
            continue
        folder = top / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _words(file: Path) -> list[str]:
    return next((line.split() for line in _lines(file)), [])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8").splitlines()
    except OSError:  # no such limit, or no such kernel
        return []
