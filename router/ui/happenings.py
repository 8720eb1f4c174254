"""What happened between two readings of a pool: who came and went, what moved, who leads, what became hot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from scheduling.view import ClusterView
from statestore.answers import PoolOverview

Happening = tuple[str, str]
"""A kind, which the page colours, and the words."""

_LISTED = 8
"""Changes of one kind that are named one by one; more are counted."""


class Reading(NamedTuple):
    """A pool at one moment."""

    overview: PoolOverview
    view: ClusterView


def happenings(earlier: Reading, later: Reading) -> Iterator[Happening]:
    """In the order in which a reader wants them: members first."""
    before, now = earlier.overview, later.overview
    yield from _few(
        [("scale", f"{name} joined as {now.loads[name].state}") for name in now.loads.keys() - before.loads]
    )
    yield from _few([("scale", f"{name} left the fleet") for name in before.loads.keys() - now.loads])
    yield from _few(
        [
            ("state", f"{name}: {before.loads[name].state} → {load.state}")
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
    yield from (("replica", f"replica {name} is gone") for name in sorted(former - present))
    owner, former_owner = (each.leader.owner if each.leader else None for each in (now, before))
    if owner != former_owner:
        yield "leader", f"{owner} leads" if owner else f"{former_owner} leads no more"


def _hot(before: ClusterView, now: ClusterView) -> Iterator[Happening]:
    hot, cold = now.tree.hot.keys() - before.tree.hot.keys(), before.tree.hot.keys() - now.tree.hot.keys()
    if hot:
        deepest = max(now.tree.hot[prefix] for prefix in hot)
        yield "hot", f"{len(hot)} prefix{'es'[: 2 * (len(hot) != 1)]} became hot, up to {deepest} blocks long"
    if cold:
        yield "hot", f"{len(cold)} prefix{'es'[: 2 * (len(cold) != 1)]} cooled down"


def _few(found: list[Happening]) -> list[Happening]:
    if len(found) <= _LISTED:
        return sorted(found)
    kind, words = found[0]
    return [(kind, f"{len(found)} instances changed, one of them: {words}")]
