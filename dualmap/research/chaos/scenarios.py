"""The scenarios by name: every fault that docs/operate/faults.md describes, and what clients may notice of it.

A stream with which no other engine can go on is the only thing that a client may lose with an engine; with a router it
loses the connections to that router. With a worker or the store it loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualmap.research.chaos import faults
from dualmap.research.chaos.checker import Outcome
from dualmap.research.chaos.fault_proxy import BLACK_HOLE, CUT, RESET, NetworkFault
from dualmap.research.chaos.stage import Scenario
from dualmap.simulation.emulator.lies import Lie

NOTHING: Final = frozenset[Outcome]()
BEGUN_STREAMS: Final = frozenset({Outcome.CUT})
"""Streams that an engine began, and with which no other can go on, may end with an error event."""
HALF_ANSWERS: Final = BEGUN_STREAMS | {Outcome.LOST}
"""Streams may end in that way, and a whole answer of which half was passed on may end there."""
CONNECTIONS: Final = frozenset({Outcome.LOST})
"""Connections to a router may end."""
OUTAGE: Final = frozenset({Outcome.CUT, Outcome.BROKEN, Outcome.REFUSED})
"""No instance is there: requests may be refused as well."""

_GONE = "An engine is stopped, or its machine is gone"
_CUT_OFF = "The leading worker is suspended, or cut off from the store"
_AWAY = "The store is away, or silent for 3 s"
_EMPTY = "The store is back empty, or evicted members"
_SPOILING = {Lie.BROKEN: HALF_ANSWERS, Lie.TRUNCATED: HALF_ANSWERS, Lie.ERROR_EVENT: BEGUN_STREAMS,
             Lie.ABORT: BEGUN_STREAMS}  # fmt: skip

_ALL = (
    # Engines
    Scenario("engine-dead", "An engine is dead", faults.dead_engine, BEGUN_STREAMS),
    Scenario("engine-suspended", _GONE, faults.suspended_engine, BEGUN_STREAMS),
    Scenario("engine-unreachable", _GONE, faults.unreachable_engine, BEGUN_STREAMS),
    Scenario("engine-slow-checks", "A machine is short of CPU", faults.slow_checks),
    Scenario("leader-blind", "Checks fail for the leader alone", faults.leader_cut_off_from_engines),
    Scenario(
        "engine-restarted", "An engine was restarted between two checks", faults.engine_restarted_at_once, BEGUN_STREAMS
    ),
    Scenario("engine-hung", "An engine hangs, and its `/health` is 200", faults.hung_engine, BEGUN_STREAMS),
    Scenario("engine-kv-full", "An engine decodes, and its KV memory is full", faults.full_kv_memory, BEGUN_STREAMS),
    Scenario("all-engines-dead", "All engines are dead", faults.all_engines_dead, OUTAGE),
    Scenario("deadly-prompt", "A prompt kills engines", faults.deadly_prompt, OUTAGE),
    Scenario("streams-left-open", "An engine leaves streams open and silent", faults.streams_left_open, BEGUN_STREAMS),
    Scenario(
        "engine-dies-draining", "An engine dies while it drains", faults.engine_dies_while_it_drains, BEGUN_STREAMS
    ),
    Scenario("engine-terminated", "An engine is dead", faults.engine_terminated, BEGUN_STREAMS),
    # The network to engines
    Scenario("engine-half-open", _GONE, faults.half_open_engine, BEGUN_STREAMS),
    Scenario("engine-reset", "An engine is dead", faults.engine_reset, BEGUN_STREAMS),
    Scenario("engine-garbage", "", faults.engine_garbage, HALF_ANSWERS),
    Scenario("engine-throttled", "A machine is short of CPU", faults.engine_throttled),
    # Routers
    Scenario("router-killed", "A router is killed", faults.killed_router, CONNECTIONS),
    Scenario("router-hung", "A router hangs", faults.hung_router, CONNECTIONS),
    # Workers
    Scenario("leader-killed", "The leading worker is killed", faults.killed_leader),
    Scenario("leader-suspended", _CUT_OFF, faults.suspended_leader),
    Scenario("leader-cut-off", _CUT_OFF, faults.leader_cut_off_from_store),
    Scenario("workers-gone", "All workers are gone", faults.all_workers_gone),
    # The store
    Scenario("store-away", _AWAY, faults.store_behind(CUT)),
    Scenario("store-silent", _AWAY, faults.store_behind(BLACK_HOLE)),
    Scenario("store-suspended", _AWAY, faults.suspended_store),
    Scenario("store-refuses", "The store refuses calls", faults.refusing_store),
    Scenario("store-late", "The network delivers calls late", faults.late_store),
    Scenario("store-back", "The store is back with its data", faults.store_behind(RESET, hold_s=5.0)),
    Scenario("store-empty", _EMPTY, faults.emptied_store),
    Scenario("store-evicted", _EMPTY, faults.evicted_members, drifts=True),
    Scenario("version-beside", "A version starts beside one that it cannot share with", faults.version_beside_another),
    Scenario("newer-version", "A newer version took the pool over", faults.newer_version),
    Scenario("clock-forward", "The store's clock jumps", faults.store_clock_jumps(600.0)),
    Scenario("clock-back", "The store's clock jumps", faults.store_clock_jumps(-600.0)),
    Scenario("store-damaged", "Somebody wrote into the fleet's keys", faults.damaged_store, drifts=True),
    Scenario("counts-drift", "Counts in the store drift", faults.drifted_counts, drifts=True),
    Scenario("store-garbage", "", faults.spoiled_store),
    Scenario("store-throttled", "", faults.store_behind(NetworkFault(bytes_per_s=500))),
    # Certificates
    Scenario("certificate-unusable", "A renewed certificate cannot be used", faults.unusable_certificate, tls=True),
    Scenario("certificate-expired", "A certificate expires", faults.expired_certificate, CONNECTIONS, tls=True),
    Scenario(
        "engine-refuses-certificate",
        "An instance refuses the client certificate",
        faults.engine_refuses_certificate,
        HALF_ANSWERS,
        tls=True,
    ),
    Scenario(
        "store-refuses-certificate",
        "The store refuses the client certificate",
        faults.store_refuses_certificate,
        tls=True,
    ),
    # Instances that lie
    *(
        Scenario(f"lie-{lie.replace('_', '-')}", "", faults.lying_engine(lie), _SPOILING.get(lie, NOTHING))
        for lie in Lie
    ),
)

SCENARIOS: Final[Mapping[str, Scenario]] = {scenario.name: scenario for scenario in _ALL}
_NOT_SOAKED = ("version-beside", "counts-drift", "store-damaged", "store-evicted", "deadly-prompt")
SOAKED: Final = tuple(name for name, scenario in SCENARIOS.items() if not scenario.tls and name not in _NOT_SOAKED)
"""Scenarios that a soak draws from."""
