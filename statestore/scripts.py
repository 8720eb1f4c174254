"""The Lua scripts, read from ``statestore/lua`` once.

A line ``-- include: clock, leases`` is replaced by ``shared/clock.lua`` and ``shared/leases.lua``, each only once;
scripts may not call each other in Redis. ``terms.NAME`` is replaced by a constant, the same in every call of a process.
``keys.NAME`` is replaced by a key of the pool (``statestore/keys.py``). What all keys begin with is the one key that
a script is given: they share a hash tag, so a script may touch any of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from statestore.keys import KEY_NAMES

_INCLUDE = "-- include: "
_NAME = re.compile(r"(?<![\w-])(terms|keys)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    source: str
    sha: str
    """SHA-1 of the source, by which the server knows it."""


def load_scripts(terms: Mapping[str, float]) -> Mapping[str, Script]:
    """Every script by its name, for example ``place_request``.

    Raises:
        KeyError: a script uses a name that does not exist.
    """
    folder = files("statestore") / "lua"
    shared = {each.name.removesuffix(".lua"): each.read_text("utf-8") for each in (folder / "shared").iterdir()}
    values = {("terms", name): repr(constant) for name, constant in terms.items()}
    values |= {("keys", name): f"KEYS[1] .. '{text}'" for name, text in KEY_NAMES.items()}
    scripts = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".lua"):
            name, lines = entry.name.removesuffix(".lua"), _with_includes(entry.read_text("utf-8"), shared, set())
            source = _NAME.sub(lambda found: values[found[1], found[2]], "\n".join(lines)) + "\n"
            # The name of a SHA-1 the server computes too; nothing is secured with it.
            scripts[name] = Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
    return scripts


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
