"""The Lua scripts, read from ``statestore/lua`` once.

Servers that have functions (Redis 7, Valkey) get all scripts as one library: its definitions are made once, and a call
runs what is left of a script. Others (Redis 6.2) get each script as a whole, and make its definitions at every call.
Both are made of the same texts.

In front of each comes ``shared/clock.lua``, which refuses a call that its caller gave up before it arrived: no script
can leave that out. Scripts may not call each other in Redis, so then comes what it uses of ``shared/``, and no more. A
blank line ends a definition there. In the library, functions at the beginning of a line, and names in capitals, are
made once; other names at the beginning of a line have a new value in every call. What a script puts into a table with a
name in capitals, the library keeps for later calls. It is emptied after a call that failed, and a script must check
that what it finds there is still so.

``terms.NAME`` is replaced by a constant, the same in every call of a process, and ``keys.NAME`` by a key of the pool
(``statestore/keys.py``). What all keys begin with is the one key that a script is given: they share a hash tag, so a
script may touch any of them. ``INSTANCE.NAME`` and ``PLACED.NAME`` are replaced by code on the fields of records
(``statestore/records.py``).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from dualmap.scheduling.queues.queue_log import QUEUE_LOG
from dualmap.scheduling.queues.queue_order import (
    BAND_MS,
    CALM_WINDOWS,
    DEFERRED_RANK_MS,
    FILL_MEMORY,
    LATE_LIMIT,
    LONG_SHARE,
    PLAN_LIMIT,
)
from dualmap.scheduling.request.metering import COUNTS, KEPT, Counts
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.allotments import WANTED_FROM
from dualmap.scheduling.tenants.budgets import DIVIDED, KINDS
from dualmap.scheduling.tenants.shares import (
    ACTIVE_S,
    FIRST_ABOVE,
    GIVEN_WINDOW_S,
    HELD_WINDOW_S,
    LEVEL_STEP,
    LEVELS,
    LEVELS_FROM,
    SENT_WINDOW_S,
)
from dualmap.statestore.keys import KEY_NAMES
from dualmap.statestore.leases import FIRST_LEASE_MS
from dualmap.statestore.pool.codec import ALL_WORK, BUDGET, CONFIRMED_STAMP, WORK, packed_counts
from dualmap.statestore.records import LUA

LEAST_LOADED = 2
"""Least loaded instances that a placement weighs beyond its candidates."""
SAMPLE_LOG = 4096
"""Entries of the sample log: some seconds of first tokens, until a new leader reads them."""

KEPT_INSTANCES = 2000
"""Instances of a pool that the library of scripts keeps: some megabytes."""

MOST_WORK_S = 1e9
"""More seconds of work than any tenant has: a book with more of them was damaged."""
USAGE_LOST = 10_000
"""Requests of dead replicas whose metering is remembered."""
USAGE_LOG = 100_000
"""Requests that are metered one by one: some megabytes. What they add up to stays for days."""

LIBRARY_PREFIX: Final = "dualmap_"
"""The names of the fleet's libraries begin with it."""
_LIBRARY_MARK: Final = "LIBRARY"
_DEFINED = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD = re.compile(r"(?<![\w.\"'])[A-Za-z_]\w*")
_COMMENT = re.compile(r"--.*")
_MADE_ONCE = re.compile(r"^local function .*?^end$\n?|^local [A-Z_]+ = [^\n]*$\n?", re.MULTILINE | re.DOTALL)
_BUILT_IN = re.compile(r"\b(?:redis\.call|(?:string|math|cjson|struct)\.\w+)")
_KEPT = re.compile(r"^local ([A-Z_]+) = {}$", re.MULTILINE)
_MADE_AT_CALLS = re.compile(r"^local (\w+(?:, \w+)*)( =)?", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^ *--.*\n?|^\n", re.MULTILINE)
_NAME = re.compile(r"(?<![\w/-])(terms|keys|INSTANCE|PLACED)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    source: str
    sha: str
    """SHA-1 of the source, by which the server knows it."""
    function: str
    """The name of its function in the library, which no function of another library has."""


@dataclass(frozen=True, slots=True)
class Scripts:
    """All scripts, in both forms."""

    by_name: Mapping[str, Script]
    library: str
    """Source of the library."""
    library_name: str
    """A name that no other source has: processes of several versions, or of other settings, use one server."""


NO_SCRIPTS: Final = Scripts({}, "", "")
"""No scripts, for connections over which only commands are sent."""


def own_clock_word(now_ms: int) -> bytes:
    """The first argument of a script that is to take this time instead of the server's, and is never too late."""
    return b"@%d" % now_ms


def load_scripts(scheduling: SchedulingSettings) -> Scripts:
    """The scripts, each by its name, for example ``place_requests``.

    Raises:
        KeyError: a script uses a name that does not exist.
    """
    values = {("terms", name): repr(constant) for name, constant in _terms(scheduling).items()}
    values |= {("keys", name): f"KEYS[1] .. '{text}'" for name, text in KEY_NAMES.items()}
    values |= LUA
    values["terms", "refused"] = "'" + "".join([f"\\{each:03}" for each in packed_counts(Counts(refused=1))]) + "'"
    values["terms", "budget_kinds"] = "{ " + ", ".join(map(repr, KINDS)) + " }"

    def filled(text: str) -> str:
        return _NAME.sub(lambda found: values[found[1], found[2]], text)

    library = filled(_library())
    library_name = f"{LIBRARY_PREFIX}{_sha1(library)[:16]}"
    scripts = {}
    for name, parts in _texts().items():
        source = filled("\n\n".join(parts))
        scripts[name] = Script(source, _sha1(source), f"{name}_{library_name}")
    return Scripts(scripts, f"#!lua name={library_name}\n{library.replace(_LIBRARY_MARK, library_name)}", library_name)


def _sha1(source: str) -> str:
    # The name that the server computes of a script, too; nothing is secured with it.
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


@cache
def _texts() -> Mapping[str, Sequence[str]]:
    """The parts of each script: the clock, what it uses of ``shared/``, and its own. Read once: a replica without its
    store must not wait."""
    folder, texts = files("dualmap.statestore") / "lua", {}
    clock = folder / "shared" / "clock.lua"
    begins = clock.read_text("utf-8").strip()
    shared = _definitions(each.read_text("utf-8") for each in (folder / "shared").iterdir() if each != clock)
    for entry in folder.iterdir():
        if entry.name.endswith(".lua"):
            text, used = entry.read_text("utf-8"), dict[str, None]()
            _collect(text, shared, used)
            texts[entry.name.removesuffix(".lua")] = (begins, *used, text)
    return texts


@cache
def _library() -> str:
    """The library, but for its name and that of its functions, for which a mark stands."""
    shared: dict[str, None] = {}
    names, functions = {"KEYS": None, "ARGV": None}, []
    for script, (begins, *used, text) in sorted(_texts().items()):
        calls, own = [], dict[str, None]()
        for part in (begins, *used):
            shared |= dict.fromkeys(_made_once(part))
            calls.append(_at_calls(part, names))
        calls.append(_at_calls(text, own))
        declared = f"local {', '.join(own)}\n" if own else ""
        functions.append(
            f"do\n{declared}{''.join(_made_once(text))}local function run()\n{''.join(calls)}end\n"
            f"redis.register_function('{script}_{_LIBRARY_MARK}', function(keys, args)\nbegin(keys, args)\n"
            "local reply = run()\nKEYS = nil\nreturn reply\nend)\nend\n"
        )
    kept = " ".join(name + " = {}" for each in shared for name in _KEPT.findall(each))
    text = _COMMENT_LINE.sub("", f"{''.join(shared)}BEGIN\n{''.join(functions)}")
    # Looked up once, in the first call: when a library is loaded, these are not there yet.
    found = sorted(set(_BUILT_IN.findall(text)))
    built_in = {each: each.replace(".", "_") for each in found}
    looked_up = f"{', '.join(built_in.values())} = {', '.join(found)}"
    begin = (
        f"local function begin(keys, args)\nif not redis_call then {looked_up} end\nif KEYS then {kept} end\n"
        "KEYS, ARGV = keys, args\nend"
    )
    code = _BUILT_IN.sub(lambda each: built_in[each[0]], text).replace("BEGIN", begin, 1)
    return f"local {', '.join(names)}\nlocal {', '.join(built_in.values())}\n{code}"


def _made_once(text: str) -> list[str]:
    return [each.rstrip() + "\n" for each in _MADE_ONCE.findall(text)]


def _at_calls(text: str, names: dict[str, None]) -> str:
    """The part of a text that is done at every call. The names that get a value there are added to ``names``."""

    def assigned(found: re.Match[str]) -> str:
        names.update(dict.fromkeys(found[1].split(", ")))
        return f"{found[1]}{found[2] or ' = nil'}"

    return _MADE_AT_CALLS.sub(assigned, _MADE_ONCE.sub("", text)).rstrip() + "\n"


def _terms(scheduling: SchedulingSettings) -> Mapping[str, float | str]:
    """Constants of the scripts: they are the same in every call of a process."""
    return {
        "kv_weight_s": scheduling.kv_weight_s,
        "stall_from_s": scheduling.decode_stall_s,
        "plan_limit": PLAN_LIMIT,
        "late_limit": LATE_LIMIT,
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
        "share_sent_s": SENT_WINDOW_S,
        "share_given_s": GIVEN_WINDOW_S,
        "share_held_s": HELD_WINDOW_S,
        "share_active_ms": round(ACTIVE_S * 1000),
        "share_levels": LEVELS,
        "share_step": LEVEL_STEP,
        "share_from": LEVELS_FROM,
        "share_first_above": FIRST_ABOVE,
        "confirmed": CONFIRMED_STAMP,
        "wanted_from": WANTED_FROM,
        "budget_bytes": BUDGET.size,
        "work": WORK.format,
        "work_bytes": WORK.size,
        "all_work": ALL_WORK.format,
        "all_work_bytes": ALL_WORK.size,
        "divided": DIVIDED,
        "most_work_s": MOST_WORK_S,
        "kept_instances": KEPT_INSTANCES,
        "usage_log": USAGE_LOG,
        "queue_log": QUEUE_LOG,
        "usage_lost": USAGE_LOST,
        "counts": "^" + " ".join(["(%d+)"] * len(COUNTS)),
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
