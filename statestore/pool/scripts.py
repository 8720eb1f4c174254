"""The Lua scripts, read from ``statestore/lua`` once.

In front of each comes ``shared/clock.lua``, which refuses a call that its caller gave up before it arrived: no script
can leave that out. Scripts may not call each other in Redis, so then comes what it uses of ``shared/``, and no more:
every call makes these functions again. A blank line ends a definition there.

``terms.NAME`` is replaced by a constant, the same in every call of a process, and ``keys.NAME`` by a key of the pool
(``statestore/keys.py``). What all keys begin with is the one key that a script is given: they share a hash tag, so a
script may touch any of them. ``INSTANCE.NAME`` and ``PLACED.NAME`` are replaced by code on the fields of records
(``statestore/records.py``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from dualmap.scheduling.queues.queue_order import (
    BAND_MS,
    CALM_WINDOWS,
    DEFERRED_RANK_MS,
    FILL_MEMORY,
    LONG_SHARE,
    PLAN_LIMIT,
)
from dualmap.scheduling.request.metering import COUNTS, KEPT, Counts
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.shares import ACTIVE_S, LEVEL_STEP, LEVELS, LEVELS_FROM, WINDOW_S
from dualmap.statestore.keys import KEY_NAMES
from dualmap.statestore.leases import FIRST_LEASE_MS
from dualmap.statestore.pool.codec import CONFIRMED_STAMP
from dualmap.statestore.records import LUA

LEAST_LOADED = 2
"""Least loaded instances that a placement weighs beyond its candidates."""
SAMPLE_LOG = 4096
"""Entries of the sample log: some seconds of first tokens, until a new leader reads them."""

USAGE_LOG = 100_000
"""Requests that are metered one by one: some megabytes. What they add up to stays for days."""

_DEFINED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
_COMMENT = re.compile(r"--.*")
_NAME = re.compile(r"(?<![\w/-])(terms|keys|INSTANCE|PLACED)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    source: str
    sha: str
    """SHA-1 of the source, by which the server knows it."""


def own_clock_word(now_ms: int) -> bytes:
    """The first argument of a script that is to take this time instead of the server's, and is never too late."""
    return b"@%d" % now_ms


def load_scripts(scheduling: SchedulingSettings) -> Mapping[str, Script]:
    """Every script by its name, for example ``place_requests``.

    Raises:
        KeyError: a script uses a name that does not exist.
    """
    values = {("terms", name): repr(constant) for name, constant in _terms(scheduling).items()}
    values |= {("keys", name): f"KEYS[1] .. '{text}'" for name, text in KEY_NAMES.items()}
    values |= LUA
    scripts = {}
    for name, text in _texts().items():
        source = _NAME.sub(lambda found: values[found[1], found[2]], text)
        # The name of a SHA-1 the server computes too; nothing is secured with it.
        scripts[name] = Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
    return scripts


@cache
def _texts() -> Mapping[str, str]:
    """Each script behind what it uses of ``shared/``. Read once: a replica without its store must not wait."""
    folder, texts = files("dualmap.statestore") / "lua", {}
    clock = folder / "shared" / "clock.lua"
    begins = clock.read_text("utf-8").strip()
    shared = _definitions(each.read_text("utf-8") for each in (folder / "shared").iterdir() if each != clock)
    for entry in folder.iterdir():
        if entry.name.endswith(".lua"):
            text, used = entry.read_text("utf-8"), dict[str, None]()
            _collect(text, shared, used)
            texts[entry.name.removesuffix(".lua")] = "\n\n".join([begins, *used, text])
    return texts


def _terms(scheduling: SchedulingSettings) -> Mapping[str, float | str]:
    """Constants of the scripts: they are the same in every call of a process."""
    return {
        "kv_weight_s": scheduling.kv_weight_s,
        "stall_from_s": scheduling.decode_stall_s,
        "plan_limit": PLAN_LIMIT,
        "calm_windows": CALM_WINDOWS,
        "long_share": LONG_SHARE,
        "least_loaded": LEAST_LOADED,
        "first_lease_ms": FIRST_LEASE_MS,
        "arrivals": scheduling.hotness_window_requests,
        "samples": scheduling.prefix_samples,
        "taught": SAMPLE_LOG,
        "band_ms": BAND_MS,
        "deferred_ms": DEFERRED_RANK_MS,
        "fill_memory": FILL_MEMORY,
        "fills": int(any(each.fills_idle for each in scheduling.classes)),
        "share_window_s": WINDOW_S,
        "share_active_ms": round(ACTIVE_S * 1000),
        "share_levels": LEVELS,
        "share_step": LEVEL_STEP,
        "share_from": LEVELS_FROM,
        "confirmed": CONFIRMED_STAMP,
        "usage_log": USAGE_LOG,
        "counts": "^" + " ".join(["(%d+)"] * len(COUNTS)),
        "refused": str(Counts(refused=1)),
        "kept": KEPT,
    }


def _definitions(texts: Iterable[str]) -> Mapping[str, str]:
    """The shared definitions, by each name that they define."""
    blocks = [block for text in texts for block in text.strip().split("\n\n")]
    defined = [(names, block) for block in blocks for names in _DEFINED.findall(block)[:1]]
    return {name: block for names, block in defined for name in names.split(", ")}


def _collect(text: str, shared: Mapping[str, str], used: dict[str, None]) -> None:
    """Add the definitions that ``text`` uses, each behind those that it uses itself."""
    for word in dict.fromkeys(_WORD.findall(_COMMENT.sub("", text))):
        block = shared.get(word)
        if block is not None and block != text and block not in used:
            _collect(block, shared, used)
            used[block] = None
