"""Memory and cores of a container, of a machine, and of groups within groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualmap.runtime.machine import cores, memory_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", figures.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


def test_without_limits_the_whole_machine_may_be_used(tmp_path: Path) -> None:
    open_ended = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }

    assert (memory_bytes(tmp_path), cores(tmp_path)) == (64 * GIB, 16)
    assert (memory_bytes(write(tmp_path, open_ended)), cores(tmp_path)) == (64 * GIB, 16)


def test_the_limits_of_a_container_count(tmp_path: Path) -> None:
    container = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/cpu.max": "250000 100000\n",
    }

    assert (memory_bytes(write(tmp_path, container)), cores(tmp_path)) == (2 * GIB, 3)


def test_the_least_limit_of_a_group_and_of_those_above_it_counts(tmp_path: Path) -> None:
    service = {
        "proc/self/cgroup": "0::/system.slice/router.service\n",
        "sys/fs/cgroup/system.slice/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/system.slice/router.service/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/system.slice/router.service/cpu.max": "50000 100000\n",
    }

    assert (memory_bytes(write(tmp_path, service)), cores(tmp_path)) == (4 * GIB, 1)


def test_memory_is_limited_by_version_1_of_control_groups_too(tmp_path: Path) -> None:
    former = {
        "proc/self/cgroup": "9:cpu,cpuacct:/\n5:memory:/docker/one\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * GIB}\n",
    }

    assert memory_bytes(write(tmp_path, former)) == 3 * GIB
