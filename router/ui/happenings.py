"""Events between two readings of a pool: who came and went, what moved, who leads, what became hot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.view import ClusterView
from dualmap.statestore.answers import PoolOverview
from dualmap.statestore.leases import RETIRED

Happening = tuple[str, str]
"""A kind, which the page colours, and the words."""

_STATE_KINDS = {InstanceState.DOWN: "trouble", InstanceState.READY: "good"}
_LISTED = 8
"""Changes of one kind that are named one by one; more are counted."""


class Reading(NamedTuple):
    """A pool at one moment."""

    overview: PoolOverview
    view: ClusterView


def happenings(earlier: Reading, later: Reading) -> Iterator[Happening]:
    """The events in the order in which a reader wants them: members first."""
    before, now = earlier.overview, later.overview
    yield from _few(
        [("scale", f"{name} joined as {now.loads[name].state}") for name in now.loads.keys() - before.loads]
    )
    yield from _few([("scale", f"{name} left the fleet") for name in before.loads.keys() - now.loads])
    yield from _few(
        [
            (_STATE_KINDS.get(load.state, "state"), f"{name}: {before.loads[name].state} → {load.state}")
            for name, load in now.loads.items()
            if name in before.loads and before.loads[name].state is not load.state
        ]
    )
    yield from _few(
        [
            ("trouble", f"{name}: {note.text}")
            for name, note in now.notes.items()
            if name not in before.notes or before.notes[name].text != note.text
        ]
    )
    yield from _replicas(before, now)
    for reason, count in now.migrations.items():
        if (moved := count - before.migrations.get(reason, 0)) > 0:
            yield "migration", f"{moved:,} held request{'s'[: moved != 1]} moved: {reason}"
    yield from _hot(earlier.view, later.view)


def _replicas(before: PoolOverview, now: PoolOverview) -> Iterator[Happening]:
    former = {replica.replica_id for replica in before.replicas if replica.is_alive(before.now_ms)}
    present = {replica.replica_id for replica in now.replicas if replica.is_alive(now.now_ms)}
    yield from (("replica", f"replica {name} joined") for name in sorted(present - former))
    died = {replica.replica_id for replica in now.replicas if replica.expires_ms != RETIRED}
    for name in sorted(former - present):
        if name in died:
            yield "trouble", f"replica {name} is gone: its lease ran out"
        else:
            yield "replica", f"replica {name} is gone"
    owner, former_owner = (each.leader.owner if each.leader else None for each in (now, before))
    if owner != former_owner:
        if owner:
            yield "leader", f"{owner} leads"
        else:
            yield "trouble", f"{former_owner} leads no more"


def _hot(before: ClusterView, now: ClusterView) -> Iterator[Happening]:
    hot, cold = now.tree.hot.keys() - before.tree.hot.keys(), before.tree.hot.keys() - now.tree.hot.keys()
    if hot:
        deepest = max(now.tree.hot[prefix] for prefix in hot)
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
