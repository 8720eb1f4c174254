"""Admission of agents' runs: as many are active as fit into the fleet's KV memory, and the others wait for a turn.

A *run* is the work of one agent, with the sub-agents that it starts. It sends one turn after the other, and each
continues the context of the turn before it. Past the point where the contexts of all runs fit into the memory, an
engine evicts what the next turn needs: every run slows down, and none ends sooner. More turns are then served by fewer
runs at once.

The store's ledger (``statestore/lua/shared/runs.lua``) has the working set of every active run, which is what its last
prompts and answers hold, less what it shares with other runs. This module has the rules by which it changes:

- A turn of an active run goes at once. So does that of another run which fits beside the active ones, unless others
  wait.
- Any other turn waits, its run is *parked*. Nothing is held back between two tokens: a run pauses where its agent has
  used a tool.
- A run that was silent for ``SILENT_S`` may have ended. It stays active while no other needs its memory, and gives way
  to a run that waits.
- A run that has had a *quantum* of service since it became active gives way to one that waits with less attained
  service: its own turn waits then. So short runs pass long ones. The quantum is a part of the mean service of runs up
  to the moment when they gave way by silence. So most runs are never interrupted, and long ones seldom. Where active
  runs have grown beyond the whole memory, which they do where many begin at once, any of them gives way so.
- Of those that wait, runs that can still meet their SLO go first. The others are late in any case, so they need more
  room (``LATE_SHARE``): memory is free again when the next run comes that can be on time, and few turns wait for long
  where otherwise many would wait for a while. One that has waited for ``AGED_S`` goes as if it were on time, after some
  of those that are; the older it is, the fewer. In each of these groups, runs of tenants that have sent more than their
  share of the work go behind the others, by the tenant's level (``scheduling.tenants.shares``). Among equals, runs go
  first that gave way by their silence before they had their quantum, as they were begun, and then the one with the
  least attained service.

Service is the memory that a run held, over the time that it was active, in token-seconds: memory is what runs compete
for. While everything fits nothing waits, and nothing differs from a fleet without admission.

Every function here is also one of the scripts (``statestore.pool.rules``).
"""

from __future__ import annotations

from typing import Final

MEMORY_SHARE: Final = 0.85
"""The part of the KV memory that active runs may fill for one whose turn can be on time. The rest is for answers under
way, shared prefixes, and copies that a run left on another instance. From 0.9 on the gain shrinks in simulated fleets
of agents."""
LATE_SHARE: Final = 0.7
"""The part that they may fill for one whose turn is late in any case."""
SILENT_S: Final = 10.0
"""A run that is silent for longer gives way: 95 % of the turns of coding agents come within this time of the answer
before them."""
AGED_S: Final = 300.0
PASSED_BY: Final = 4
"""Runs that go before one that waits since ``AGED_S``; none go before one that waits for twice as long."""
QUANTUM_SHARE: Final = 0.7
"""The quantum over the mean service of runs."""
QUANTUM_FROM: Final = 5
"""Runs that must have given way by silence before a quantum is known. Until then no run gives way while it works."""
QUANTUM_WINDOW: Final = 200
"""Runs over which their service is a mean."""
WAITS_OF_SLO: Final = 0.8
"""The part of its SLO for which a turn may wait for memory and be on time: the rest is for its prefill."""
AGED: Final = 0
ON_TIME: Final = 1
LATE: Final = 2
_BEHIND: Final = 1e12
"""More token-seconds than any run attains."""
LEVEL_RANK: Final = 1e14
"""A level of its tenant puts a run behind by so much: more than a time, or a service."""


def goes_as(since_ms: int, now_ms: int, on_time: int, passed: int) -> int:
    """The group of which the next run goes: ``AGED``, ``ON_TIME`` or ``LATE``. ``since_ms`` is when the first one came
    of those that wait, ``on_time`` is 1 where one of them can be on time, and ``passed`` is how many have gone since
    the last one that had aged."""
    age = (now_ms - since_ms) / (AGED_S * 1000)
    aged_goes = age > 1 and (on_time == 0 or passed >= PASSED_BY * (2 - age))
    return AGED if aged_goes else (ON_TIME if on_time == 1 else LATE)


def room_tokens(group: int, capacity_tokens: int, on_time_ms: int, now_ms: int) -> float:
    """The tokens that active runs may have, where one of a group is let go. ``on_time_ms`` is when the last one was let
    go that could be on time: where none come, no room is kept for them."""
    keeps_room = group == LATE and now_ms - on_time_ms < SILENT_S * 1000
    return (LATE_SHARE if keeps_room else MEMORY_SHARE) * capacity_tokens


def missing_tokens(tokens: int, used_tokens: int, room_tokens: float) -> float:
    """The tokens that active runs must leave for a working set to fit beside theirs; none or less where it does. One
    run alone always fits."""
    return used_tokens + tokens - room_tokens if used_tokens > 0 else 0


def silent_since_ms(now_ms: int) -> float:
    """The time before which a run must have been seen last to give way by silence now."""
    return now_ms - SILENT_S * 1000


def waiting_rank(service: float, interrupted: int, level: int) -> float:
    """The order among runs that wait, and of which none has aged, and all or none can be on time: the least goes
    first. ``interrupted`` is 1 where the run gave way by silence before it had its quantum, ``level`` the level of its
    tenant."""
    return level * LEVEL_RANK + (service if interrupted == 1 else _BEHIND + service)


def waiting_since(since_ms: int, level: int) -> float:
    """The order by which runs age."""
    return level * LEVEL_RANK + since_ms


def has_had_quantum(service: float, quantum_from: float, ended_runs: int, mean_service: float) -> bool:
    """Whether an active run has had its quantum. ``quantum_from`` is its service when that began."""
    return ended_runs >= QUANTUM_FROM and service - quantum_from >= QUANTUM_SHARE * mean_service


def gives_way(service: float, first_service: float, had_quantum: int, used_tokens: int, capacity_tokens: int) -> bool:
    """Whether an active run whose turn has come leaves its memory to the first that waits, where that does not fit
    beside it. ``had_quantum`` is 1 where it has had its quantum."""
    return first_service < service and (had_quantum == 1 or used_tokens > capacity_tokens)


def mean_service_with(service: float, ended_runs: int, mean_service: float) -> float:
    """The mean service of runs with one more, which is the last of ``ended_runs``."""
    return mean_service + (service - mean_service) / min(ended_runs, QUANTUM_WINDOW)


def continues(prompt_tokens: int, context_tokens: int, output_tokens: int) -> bool:
    """Whether a prompt that begins with all full blocks of a known context continues that. Prompts that begin alike and
    were not answered into each other do not: a continuation has most of the answer as well."""
    return prompt_tokens >= context_tokens + max(1, output_tokens / 2)
