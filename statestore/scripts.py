"""The Lua scripts, read from ``statestore/lua`` once.

A file is named ``<verb>_<noun>-<key count>.lua`` (N: any number of keys). A line ``-- include: name`` puts
``shared/name.lua`` in its place, the first time it is met; scripts may not call each other in Redis.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_INCLUDE = "-- include: "


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    key_count: int | None
    """Keys that it takes; None for any number."""
    source: str
    sha: str
    """SHA-1 of the source, by which the server knows it."""


def load_scripts() -> Mapping[str, Script]:
    """Every script by its name without key count, for example ``reserve_request``."""
    folder = files("statestore") / "lua"
    scripts = (_load(entry, folder / "shared") for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return {script.name: script for script in scripts}


def _load(entry: Traversable, shared: Traversable) -> Script:
    name, _, count = entry.name.removesuffix(".lua").partition("-")
    source = "\n".join(_with_includes(entry.read_text("utf-8"), shared, set())) + "\n"
    # The name of a SHA-1 the server computes too; nothing is secured with it.
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, None if count == "N" else int(count), source, sha)


def _with_includes(text: str, shared: Traversable, included: set[str]) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith(_INCLUDE):
            lines.append(line)
            continue
        name = line.removeprefix(_INCLUDE).strip()
        if name not in included:
            included.add(name)
            lines += _with_includes((shared / f"{name}.lua").read_text("utf-8"), shared, included)
    return lines
