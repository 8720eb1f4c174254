"""The Lua scripts of ``statestore/lua``, assembled for servers once.

Each file there is a module of plain Lua 5.1, which any editor and ``luacheck`` read. ``require('shared.kv')`` gives
what the module ``shared/kv.lua`` returns, as Lua's own ``require`` does; that form, with the name as a text, is the
only one. Two modules are written from Python's declarations: ``require('records')`` gives functions on records
(``statestore/records.py``), ``require('rules')`` rules of ``scheduling`` (``statestore/pool/rules.py``). A module of
``lua/`` itself is a script: it returns a function, which is given the time and returns the reply.

Servers that have functions (Redis 7, Valkey) get all scripts as one library, whose modules are run once, at the first
call: while a server loads a library, nothing of Lua is there yet. What a module keeps in its local names stays for
later calls. Where that holds for one call only, it is reset at the end of the call, or by a function ``begin`` that the
module returns, which is called before each script that uses the module. After a call that failed all modules are run
again, since it may have left anything half done. Other servers (Redis 6.2) get each script as a whole, with the modules
that it uses, which are run at every call.

Every script is run by ``shared/call.lua``, which refuses a call that its caller gave up before it arrived.

Two names are no module's: ``terms.NAME`` is a constant, the same in every call of a process, and ``keys.NAME`` a key of
the pool (``statestore/keys.py``). Their values are written into the text. What all keys begin with is the one key that
a script is given: they share a hash tag, so a script may touch any of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from dualmap.scheduling.estimates.weights import Form
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
from dualmap.scheduling.runs.admission import AGED, LEVEL_RANK, ON_TIME
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import WINDOW_REQUESTS
from dualmap.scheduling.state.instance import UNLABELLED
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
from dualmap.statestore.pool.adapters import RUNNING_SCORE
from dualmap.statestore.pool.codec import ALL_WORK, BUDGET, CONFIRMED_STAMP, INNER_STAMP, WORK, packed_counts
from dualmap.statestore.pool.rules import rules_module
from dualmap.statestore.records import lua_module

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

MAX_RUNS = 65_536
"""Runs that are remembered. The longest silent one is forgotten first."""
MAX_BRANCHES = 64
"""Agents and sub-agents of a run that are remembered."""
MAX_WAITING_TURNS = 256
"""Turns of one run that may wait."""
MAX_CONTEXTS = 65_536
"""Contexts that are remembered to know the run of a prompt by its content, per generation."""
RUN_SAMPLES = 250
"""Sampled prefixes by which the context that a prompt continues is looked for: those of its last 256,000 tokens."""
FORGET_RUN_MS = 3_600_000
"""A run that is silent for longer is forgotten, and what is left of it, whatever became of its turns."""

LIBRARY_PREFIX: Final = "dualmap_"
"""The names of the fleet's libraries begin with it."""
_REQUIRED = re.compile(r"\brequire\('([\w.]+)'\)")
_BEGINS = re.compile(r"^local function begin\(\)", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^ *--.*\n?|^\n", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.'])(terms|keys)\.(\w+)")
_WRITTEN: Final = {"records": lua_module, "rules": rules_module}
"""Modules that are written from Python's declarations."""
_RUNNER: Final = "shared.call"
"""The module that runs every script."""


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
    return _assembled(tuple(_terms(scheduling).items()))


@cache
def _assembled(terms: tuple[tuple[str, float | str], ...]) -> Scripts:
    """The scripts with these constants: few processes have more than one set of them, and tests start many stores."""
    values = {("terms", name): repr(constant) for name, constant in terms}
    values |= {("keys", name): f"KEYS[1] .. '{text}'" for name, text in KEY_NAMES.items()}
    values["terms", "refused"] = "'" + "".join([f"\\{each:03}" for each in packed_counts(Counts(refused=1))]) + "'"
    values["terms", "budget_kinds"] = "{ " + ", ".join(map(repr, KINDS)) + " }"
    modules = {name: _NAME.sub(lambda found: values[found[1], found[2]], text) for name, text in _modules().items()}
    names = [name for name in modules if "." not in name and name not in _WRITTEN]
    library = _library(modules, names)
    library_name = f"{LIBRARY_PREFIX}{_sha1(library)[:16]}"
    registered = [f"redis.register_function('{name}_{library_name}', called('{name}'))\n" for name in names]
    scripts = {}
    for name in names:
        source = _whole(modules, name)
        scripts[name] = Script(source, _sha1(source), f"{name}_{library_name}")
    return Scripts(scripts, f"#!lua name={library_name}\n{library}{''.join(registered)}", library_name)


def _sha1(source: str) -> str:
    # The name that the server computes of a script, too; nothing is secured with it.
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


PREFIX_SAMPLES = 200_000
"""Prefixes whose last instance is remembered, per generation."""


@cache
def _modules() -> Mapping[str, str]:
    """The text of each module by its name, without comments. Read once: a replica without its store must not wait."""
    folder = files("dualmap.statestore") / "lua"
    texts = {name: text() for name, text in _WRITTEN.items()}
    for prefix, place in (("shared.", folder / "shared"), ("", folder)):
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith(".lua"):
                texts[prefix + entry.name.removesuffix(".lua")] = entry.read_text("utf-8")
    return {name: _COMMENT_LINE.sub("", text) for name, text in texts.items()}


def _used(modules: Mapping[str, str], *names: str) -> dict[str, None]:
    """The modules and all that they require, each behind what it requires itself."""
    used: dict[str, None] = {}
    for name in names:
        used |= _used(modules, *_REQUIRED.findall(modules[name])) | {name: None}
    return used


def _run(modules: Mapping[str, str], names: Iterable[str]) -> str:
    """Code that runs modules, in this order."""
    run = "".join([f"loaded['{name}'] = (function()\n{modules[name]}end)()\n" for name in names])
    return f"local loaded = {{}}\nlocal function require(name) return loaded[name] end\n{run}"


def _begins(modules: Mapping[str, str], script: str) -> str:
    """Code for the functions by which the modules of a script begin a call."""
    names = [name for name in _used(modules, script) if _BEGINS.search(modules[name])]
    return "{ " + ", ".join([f"loaded['{name}'].begin" for name in names]) + " }"


def _whole(modules: Mapping[str, str], script: str) -> str:
    """The source of one script."""
    run = _run(modules, _used(modules, _RUNNER, script))
    return f"{run}return loaded['{_RUNNER}'](loaded['{script}'], {_begins(modules, script)})"


def _library(modules: Mapping[str, str], scripts: Sequence[str]) -> str:
    """The library, but for its name and that of its functions."""
    entries = [f"{name} = {{ loaded['{name}'], {_begins(modules, name)} }},\n" for name in scripts]
    return f"""\
local KEYS, ARGV, run, scripts, is_under_way
local function run_modules()
{_run(modules, _used(modules, _RUNNER, *scripts))}run = loaded['{_RUNNER}']
scripts = {{
{"".join(entries)}}}
end
local function called(name)
return function(keys, args)
if is_under_way or not scripts then run_modules() end
KEYS, ARGV, is_under_way = keys, args, true
local script = scripts[name]
local reply = run(script[1], script[2])
is_under_way = false
return reply
end
end
"""


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
        "arrivals": WINDOW_REQUESTS,
        "max_prefixes": PREFIX_SAMPLES,
        "max_samples": SAMPLE_LOG,
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
        "running_score": RUNNING_SCORE,
        "inner": INNER_STAMP,
        "wanted_from": WANTED_FROM,
        "budget_bytes": BUDGET.size,
        "work": WORK.format,
        "work_bytes": WORK.size,
        "all_work": ALL_WORK.format,
        "all_work_bytes": ALL_WORK.size,
        "divided": DIVIDED,
        "most_work_s": MOST_WORK_S,
        "kept_instances": KEPT_INSTANCES,
        "loads_from": Form._fields.index("load_s") + 1,
        "usage_log": USAGE_LOG,
        "queue_log": QUEUE_LOG,
        "usage_lost": USAGE_LOST,
        "level_rank": LEVEL_RANK,
        "aged": AGED,
        "on_time": ON_TIME,
        "max_runs": MAX_RUNS,
        "max_branches": MAX_BRANCHES,
        "max_contexts": MAX_CONTEXTS,
        "max_waiting_turns": MAX_WAITING_TURNS,
        "run_samples": RUN_SAMPLES,
        "forget_run_ms": FORGET_RUN_MS,
        "counts": "^" + " ".join(["(%d+)"] * len(COUNTS)),
        "kept": KEPT,
        "unlabelled": UNLABELLED,
    }
