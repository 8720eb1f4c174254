"""Events between two readings of a pool: who came and went, what moved, who leads, what became hot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.call_values import PoolOverview
from dualmap.statestore.leases import RETIRED

Happening = tuple[str, str]
"""A kind, which the page colours, and the words."""

_STATE_KINDS = {InstanceState.DOWN.value: "trouble", InstanceState.READY.value: "good"}
MOST_HOT = 512
"""Hot prefixes that a reading has at most."""
_LISTED = 8
"""Changes of one kind that are named one by one; more are counted."""


class Reading(NamedTuple):
    """A pool at one moment."""

    states: Mapping[str, str]
    """States of the instances by id."""
    notes: Mapping[str, str]
    """Complaints about instances by id."""
    replicas: frozenset[str]
    """The living ones."""
    died: frozenset[str]
    """The processes whose lease ran out."""
    leader: str
    """"": none."""
    migrations: Mapping[str, int]
    hot: Mapping[int, int]
    """Hot prefixes with their length in blocks."""

    @classmethod
    def of(cls, overview: PoolOverview, view: ClusterView) -> Reading:
        now_ms, replicas = overview.now_ms, overview.replicas
        alive = frozenset(each.replica_id for each in replicas if each.is_alive(now_ms))
        kept = frozenset(each.replica_id for each in replicas if each.expires_ms != RETIRED)
        return cls(
            {name: load.state.value for name, load in overview.loads.items()},
            {name: note.text for name, note in overview.notes.items()},
            alive,
            kept - alive,
            overview.leader.owner if overview.leader else "",
            overview.migrations,
            dict(islice(view.tree.hot.items(), MOST_HOT)),
        )


def happenings(before: Reading, now: Reading) -> Iterator[Happening]:
    """The events in the order in which a reader wants them: members first."""
    yield from _few([("scale", f"{name} joined as {now.states[name]}") for name in now.states.keys() - before.states])
    yield from _few([("scale", f"{name} left the fleet") for name in before.states.keys() - now.states.keys()])
    yield from _few(
        [
            (_STATE_KINDS.get(state, "state"), f"{name}: {before.states[name]} → {state}")
            for name, state in now.states.items()
            if name in before.states and before.states[name] != state
        ]
    )
    yield from _few(
        [("trouble", f"{name}: {text}") for name, text in now.notes.items() if before.notes.get(name) != text]
    )
    yield from _replicas(before, now)
    for reason, count in now.migrations.items():
        if (moved := count - before.migrations.get(reason, 0)) > 0:
            yield "migration", f"{moved:,} held request{'s'[: moved != 1]} moved: {reason}"
    yield from _hot(before.hot, now.hot)


def _replicas(before: Reading, now: Reading) -> Iterator[Happening]:
    yield from (("replica", f"replica {name} joined") for name in sorted(now.replicas - before.replicas))
    for name in sorted(before.replicas - now.replicas):
        if name in now.died:
            yield "trouble", f"replica {name} is gone: its lease ran out"
        else:
            yield "replica", f"replica {name} is gone"
    if now.leader != before.leader:
        if now.leader:
            yield "leader", f"{now.leader} leads"
        else:
            yield "trouble", f"{before.leader} leads no more"


def _hot(before: Mapping[int, int], now: Mapping[int, int]) -> Iterator[Happening]:
    hot, cold = now.keys() - before.keys(), before.keys() - now.keys()
    if hot:
        deepest = max(now[prefix] for prefix in hot)
        yield "hot", f"{len(hot)} prefix{'es'[: 2 * (len(hot) != 1)]} became hot, up to {deepest} blocks long"
    if cold:
        yield "hot", f"{len(cold)} prefix{'es'[: 2 * (len(cold) != 1)]} cooled down"


def _few(found: list[Happening]) -> Iterator[Happening]:
    """Each kind by itself, so that many instances that come back do not hide one that fails."""
    for kind in sorted({kind for kind, _ in found}):
        words = sorted(words for of_kind, words in found if of_kind == kind)
        if len(words) <= _LISTED:
            yield from ((kind, each) for each in words)
        else:
            yield kind, f"{len(words)} instances changed, one of them: {words[0]}"
