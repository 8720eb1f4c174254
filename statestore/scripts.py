"""The Lua scripts, read from ``statestore/lua`` once.

A file is named ``<verb>_<noun>-<key count>.lua`` (N: any number of keys). A line ``-- include: clock, leases``
is replaced by ``shared/clock.lua`` and ``shared/leases.lua``, each only once; scripts may not call each other in Redis.
``terms`` is not a file: it is the constants, the same in every call of a process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_INCLUDE = "-- include: "
_TERMS = "terms"


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    key_count: int | None
    """Keys that it takes; None for any number."""
    source: str
    sha: str
    """SHA-1 of the source, by which the server knows it."""


def load_scripts(terms: Mapping[str, float]) -> Mapping[str, Script]:
    """Every script by its name without key count, for example ``place_request``."""
    folder = files("statestore") / "lua"
    shared = {each.name.removesuffix(".lua"): each.read_text("utf-8") for each in (folder / "shared").iterdir()}
    constants = ", ".join(f"{name} = {value!r}" for name, value in terms.items())
    shared[_TERMS] = "local terms = { " + constants + " }"
    scripts = (_load(entry, shared) for entry in folder.iterdir() if entry.name.endswith(".lua"))
    return {script.name: script for script in scripts}


def _load(entry: Traversable, shared: Mapping[str, str]) -> Script:
    name, _, count = entry.name.removesuffix(".lua").partition("-")
    source = "\n".join(_with_includes(entry.read_text("utf-8"), shared, set())) + "\n"
    # The name of a SHA-1 the server computes too; nothing is secured with it.
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name, None if count == "N" else int(count), source, sha)


def _with_includes(text: str, shared: Mapping[str, str], included: set[str]) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith(_INCLUDE):
            lines.append(line)
            continue
        for name in line.removeprefix(_INCLUDE).split(", "):
            if name not in included:
                included.add(name)
                lines += _with_includes(shared[name], shared, included)
    return lines
