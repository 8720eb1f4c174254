"""Data of the live page, as plain values: pure functions of a pool's overview, its view and its explained requests.

Lists instead of objects where there is one per instance or request: they are sent every second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from dualmap.router.requests.explain import Explanation
from dualmap.router.telemetry.traffic import TrafficCounts
from dualmap.scheduling.estimates.kv_tiers import InstanceTier
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.state.ring import DualRing, Ring
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import PoolOverview

RING_ARCS = 720
"""Samples of each ring: half a degree."""
SHOWN_KEYS = 16
SHOWN_HOT_PREFIXES = 32
_RING_SIZE = 1 << 64
_LONGEST_FAILURE = 200
_UNREMARKABLE = frozenset({None, Outcome.COMPLETED, Outcome.ENDED, Outcome.CLIENT_GONE})

SHOWN_ADAPTERS = 12
"""Names of adapters of an instance that are shown."""

LOAD_FIELDS = (
    "pending_tokens", "dispatched_tokens", "deferred_tokens", "queued_requests", "running_requests", "context_tokens",
    "kv_capacity_tokens", "cached_blocks", "dispatch_window_tokens", "prefill_tokens_per_s", "stalled_s",
)  # fmt: skip
"""Fields of every instance, behind its id and its state."""

REQUEST_FIELDS = (
    "id", "received_unix_s", "model", "pool", "instance_id", "prompt_tokens", "cached_tokens", "held_s",
    "first_token_s", "done_s", "slo_s", "outcome", "reason", "tries", "replica_id", "hash_key", "failure", "tenant",
    "limited", "late", "notable",
)  # fmt: skip


def load_row(load: InstanceLoad) -> list[Any]:
    """One instance, as ``LOAD_FIELDS`` says."""
    return [
        load.instance_id, load.state.value, load.pending_tokens, load.dispatched_tokens, load.deferred_tokens,
        load.queued_requests, load.running_requests, load.context_tokens, load.kv_capacity_tokens, load.cached_blocks,
        load.dispatch_window_tokens, round(load.prefill_tokens_per_s), round(load.stalled_s, 1),
    ]  # fmt: skip


def pool_figures(
    overview: PoolOverview, traffic: TrafficCounts, keys: Mapping[int, tuple[int, int]], rings: DualRing
) -> dict[str, Any]:
    """The figures that change every second. ``keys`` are hash keys with their length in blocks and their requests."""
    leader = overview.leader
    return {
        "loads": [load_row(load) for load in overview.loads.values()],
        "replicas": [
            [
                replica.replica_id,
                replica.is_alive(overview.now_ms),
                replica.info.get("requests", ""),
                replica.info.get("host", ""),
                replica.info.get("version", ""),
            ]
            for replica in sorted(overview.replicas, key=lambda replica: replica.replica_id)
        ],
        "leader": None if leader is None else {"owner": leader.owner, "fence": leader.fence},
        "migrations": dict(overview.migrations),
        "traffic": {name: getattr(traffic, name) for name in TrafficCounts.__dataclass_fields__},
        "keys": _hottest(keys, rings),
        "tiers": {name: [_tier_row(each) for each in tiers.tiers] for name, tiers in overview.tiers.items()},
        "doubts": dict(overview.doubts),
        "runs": [overview.runs.used_tokens, overview.runs.capacity_tokens, overview.runs.waiting_turns],
    }


def _tier_row(each: InstanceTier) -> list[Any]:
    """A tier, its tokens, its price, and why that is a default."""
    return [each.tier.value, each.tokens, each.price.start_s, each.price.token_s, each.reason]


def _hottest(keys: Mapping[int, tuple[int, int]], rings: DualRing) -> list[list[Any]]:
    """Hash key, its length in blocks, its requests, where it falls on either ring (0..1), its pair; most requests
    first."""
    most = sorted(keys.items(), key=lambda entry: (-entry[1][1], entry[0]))[:SHOWN_KEYS]
    return [
        [
            f"{key:016x}",
            blocks,
            count,
            round(rings.first.position_of(key) / _RING_SIZE, 5),
            round(rings.second.position_of(key) / _RING_SIZE, 5),
            list(rings.pair(key)),
        ]
        for key, (blocks, count) in most
    ]


def topology(view: ClusterView) -> dict[str, Any]:
    """The figures that change with members and hot prefixes: adapters that instances list, how many, and some of them;
    the rings as arcs of equal length, each the index of the
    member that owns its middle, and the longest hot prefixes with their depth in blocks."""
    return {
        "epoch": view.epoch,
        "tree_version": view.tree_version,
        "members": list(view.rings.members),
        "urls": {instance_id: spec.url for instance_id, spec in view.instances.items()},
        "adapters": {
            instance_id: [len(spec.adapters), sorted(spec.adapters)[:SHOWN_ADAPTERS]]
            for instance_id, spec in view.instances.items()
            if spec.adapters
        },
        "rings": [_arcs(ring, view.rings.members) for ring in (view.rings.first, view.rings.second)],
        "hot": [[f"{prefix:016x}", depth] for prefix, depth in longest_hot(view.tree)[:SHOWN_HOT_PREFIXES]],
    }


def longest_hot(tree: HotnessTree) -> list[tuple[int, int]]:
    """Hot prefixes with their depth, the longest first, of those depths at which some end: of a long prefix that all
    its own prefixes share, one is listed in place of all."""
    at_depth = Counter(tree.hot.values())
    ends = [(prefix, depth) for prefix, depth in tree.hot.items() if at_depth[depth] > at_depth[depth + 1]]
    return sorted(ends, key=lambda entry: (-entry[1], entry[0]))


def _arcs(ring: Ring, members: Sequence[str]) -> list[int]:
    if not members:
        return []
    index = {member: number for number, member in enumerate(members)}
    step = _RING_SIZE // RING_ARCS
    return [index[owner] for owner in ring.owners_at(step * arc + step // 2 for arc in range(RING_ARCS))]


def is_notable(explanation: Explanation) -> bool:
    """Whether a request that ended failed, was late, or was tried on several instances."""
    failed = bool(explanation.detours.failures) or explanation.answer.outcome not in _UNREMARKABLE
    return failed or explanation.course.on_time is False


def request_row(explanation: Explanation, replica_id: str) -> list[Any]:
    """One request, as ``REQUEST_FIELDS`` says; what is not known yet is None."""
    origin, course, rounds = explanation.origin, explanation.course, explanation.rounds
    failures = explanation.detours.failures
    return [
        origin.request_id,
        round(course.received_unix_s, 2),
        origin.model,
        origin.pool,
        explanation.answer.instance_id or (rounds[-1].decision.instance_id if rounds else None),
        explanation.prompt_tokens,
        explanation.cached_tokens,
        _rounded(course.held_s),
        _rounded(course.first_token_s),
        _rounded(course.done_s),
        course.slo_s,
        explanation.answer.outcome,
        rounds[-1].decision.reason.value if rounds else None,
        explanation.answer.tries,
        replica_id,
        f"{explanation.prompt.key.hash:016x}",
        failures[-1][:_LONGEST_FAILURE] if failures else None,
        origin.tenant,
        "; ".join(explanation.detours.limits)[:_LONGEST_FAILURE] or None,
        course.on_time is False,
        is_notable(explanation),
    ]


class KeptRows:
    """Rows of requests by id, the newest state of each: the latest ones, and beside them the latest notable ones, which
    would be gone within seconds under load."""

    def __init__(self, latest: int, notable: int) -> None:
        self._kept: tuple[tuple[dict[str, list[Any]], int], ...] = (({}, latest), ({}, notable))

    def add(self, rows: Iterable[list[Any]]) -> None:
        (latest, _), (notable, _) = self._kept
        for row in rows:
            latest[row[0]] = row
            if row[-1]:
                notable[row[0]] = row
        for kept, limit in self._kept:
            for request_id in [*islice(kept, max(0, len(kept) - limit))]:
                del kept[request_id]

    def rows(self) -> list[list[Any]]:
        (latest, _), (notable, _) = self._kept
        return [*(notable | latest).values()]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def key_counts(explanations: Iterable[Explanation], pool: str) -> dict[int, tuple[int, int]]:
    """The hash keys of a pool's requests, with their length in blocks and how many requests had them."""
    counted = Counter(
        (each.prompt.key.hash, each.prompt.key.blocks) for each in explanations if each.origin.pool == pool
    )
    return {key: (blocks, count) for (key, blocks), count in counted.items()}


def merged_keys(several: Iterable[Mapping[int, tuple[int, int]]]) -> dict[int, tuple[int, int]]:
    total: dict[int, tuple[int, int]] = {}
    for counts in several:
        for key, (blocks, count) in counts.items():
            total[key] = (blocks, count + total.get(key, (0, 0))[1])
    return total
