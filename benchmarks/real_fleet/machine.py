"""The machine that figures were measured on, as far as it reveals itself."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Card:
    """One NVIDIA card, as ``nvidia-smi`` lists it."""

    index: int
    name: str
    memory_mib: int
    driver: str


def cards_here() -> tuple[Card, ...]:
    """The NVIDIA cards of this machine; none where there is no ``nvidia-smi``."""
    query = ("nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits")
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.count(",") == 3]
    return tuple(
        Card(int(index), name, int(float(memory)), driver)
        for index, name, memory, driver in rows
        if memory.replace(".", "").isdigit()
    )


def describe_machine(cards: tuple[Card, ...]) -> dict[str, Any]:
    return {
        "cards": [asdict(card) for card in cards],
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def machine_sentence(machine: dict[str, Any]) -> str:
    """The description in one line; what is unknown is left out."""
    cards: dict[str, int] = {}
    for card in machine["cards"]:
        kind = f"{card['name']} ({card['memory_mib']:,} MiB, driver {card['driver']})"
        cards[kind] = cards.get(kind, 0) + 1
    parts = [f"{count} × {kind}" for kind, count in cards.items()]
    parts.append(f"{machine['cores']} cores" + (f" of {machine['processor']}" if machine["processor"] else ""))
    if machine["memory_gib"] is not None:
        parts.append(f"{machine['memory_gib']} GiB of memory")
    return ", ".join((*parts, machine["system"], f"Python {machine['python']}"))


def _processor() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory_gib() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (OSError, ValueError):
        return None
