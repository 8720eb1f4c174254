"""Rollout keeper: adds up what revisions show, and moves a rollout on, or back, as the gate says."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, figures_from
from dualmap.scheduling.revisions.rollout import Move, Rollout, RolloutState, advanced
from dualmap.scheduling.revisions.weights import RevisionWeights
from dualmap.statestore.leases import REVISIONS_FIELD, SHADOWS_FIELD, ReplicaInfo
from dualmap.workers.context import LeaderContext

log = logging.getLogger(__name__)

BY: Final = "the gate"
_Read = dict[tuple[str, str], Figures]
"""Figures by replica and revision."""


class RolloutKeeper:
    """Holds each step of a rollout until the figures of its revisions say that the new one is as good as the others, or
    takes it back at once where it is worse.

    What was added up is in the rollout's record, so another leader goes on from there.
    """

    name = "rollouts"
    interval_s = 1.0

    def __init__(self, context: LeaderContext) -> None:
        self._context = context
        self._version: int | None = None
        """The version of the weights that ``_read`` is of; None: no figures were read in this term."""
        self._read: _Read = {}
        """What was added up already."""

    async def tick(self) -> None:
        """Look once. Raises StoreUnavailableError, LeaseLostError."""
        context, revisions = self._context, self._context.pool.revisions
        known = await revisions.rollout()
        if known is None or known.state is not RolloutState.RUNNING:
            self._version = None
            return
        field = SHADOWS_FIELD if known.is_shadowing else REVISIONS_FIELD
        read = _figures_of((await context.pool.overview()).replicas, field, known.version)
        before = self._read
        if self._version != known.version:
            # Counts of this version began with it. What another leader has added of them is not known.
            before = read if self._version is None and known.figures else {}
        grown = _grown(read, before)

        def planned(rollout: Rollout | None, weights: RevisionWeights, now_ms: int) -> Move | None:
            if rollout is None or rollout.version != known.version:
                return None
            held = rollout.with_figures(grown)
            return advanced(held, weights, now_ms) or (Move(held, weights, "") if grown else None)

        move = await revisions.conduct(planned, by=BY, fence=context.fence)
        self._version, self._read = known.version, read
        if move is not None:
            await self._tell(move)

    async def _tell(self, move: Move) -> None:
        """Report a move that was made."""
        rollout, pool, metrics = move.rollout, self._context.pool, self._context.metrics
        percent = 0.0 if rollout.state is RolloutState.ROLLED_BACK else rollout.percent
        metrics.rollout_percent.labels(pool.name, rollout.revision).set(percent)
        if move.text:
            metrics.rollout_moves.labels(pool.name, rollout.state.value).inc()
            log.warning("rollout pool=%s revision=%s: %s", pool.name, rollout.revision, move.text)
            await pool.chronicle.note("rollout", move.text)


def _figures_of(replicas: Iterable[ReplicaInfo], field: str, version: int) -> _Read:
    return {
        (each.replica_id, revision): figures
        for each in replicas
        for revision, figures in figures_from(each.info.get(field, ""), version).items()
    }


def _grown(read: _Read, before: Mapping[tuple[str, str], Figures]) -> dict[str, Figures]:
    """What came since, by revision."""
    grown: dict[str, Figures] = {}
    for key, figures in read.items():
        more = figures.since(before.get(key, NO_FIGURES))
        if more.requests:
            grown[key[1]] = grown.get(key[1], NO_FIGURES).plus(more)
    return grown
