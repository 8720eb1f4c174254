"""The pool in virtual time as one of several router replicas sees it that share no store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dualmap.research.unshared.load_view import KnownLoad, LoadReadings
from dualmap.research.unshared.shown_counts import ShownCounts
from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply, PlaceStatus
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet

_NEVER = -1
"""Most pending tokens of a placement that is weighed and not made."""


class UnsharedFleet(SimulatedFleet):
    """Weighs and observes by the loads that the replica knows, and books what it sends itself alone: the dispatch
    window of an instance holds the replica's own requests."""

    shown: ShownCounts
    """The replica's books."""
    readings: LoadReadings
    """Set before the run: they are those of all replicas."""
    number = 0
    """The replica's number from 0."""

    @contextmanager
    def in_view(self) -> Iterator[Mapping[str, KnownLoad]]:
        """The loads that the replica knows, in its books until the end."""
        known = self.readings.known_to(self.number)
        with self.shown.show(known):
            yield known

    async def place(self, placement: Placement) -> PlaceReply:
        weighing, queueing = placement.weighing, placement.queueing
        if len(weighing.instances) == 1 and weighing.beyond_from_s is None:
            # Chosen by what was observed; nothing has changed since.
            return await self.pool.store.place(replace(placement, max_pending_tokens=None))
        with self.in_view():
            never = replace(placement, max_pending_tokens=_NEVER, queueing=replace(queueing, refuses=False))
            weighed = await self.pool.store.place(never)
        if weighed.status is not PlaceStatus.STALE or weighed.chosen.instance_id is None:
            return weighed
        chosen = tuple(filter(None, (weighed.chosen.instance_id, weighed.chosen.alternative_id)))
        weights = weighing.weights._replace(cost=Form(), missed=Form())  # the first of equal cost is taken
        equal = replace(weighing, instances=chosen, weights=weights, beyond_from_s=None)
        reply = await self.pool.store.place(replace(placement, weighing=equal))
        seen = replace(reply.seen, loads=weighed.seen.loads, hits=weighed.seen.hits)
        return replace(reply, seen=seen, chosen=replace(reply.chosen, ttft_s=weighed.chosen.ttft_s))

    async def observe(self, instance_ids: Sequence[str], chain: Chain) -> Observation:
        with self.in_view() as known:
            seen = await self.pool.store.observe(instance_ids, chain)
        loads = {name: self._as_known(load, known[name]) for name, load in seen.loads.items()}
        # Equal costs take turns, and the turns of the replicas are not in step.
        return replace(seen, sequence=seen.sequence + self.number, loads=loads)

    def _as_known(self, load: InstanceLoad, known: KnownLoad) -> InstanceLoad:
        load = replace(load, window_tokens=known.window_tokens, kv_used_tokens=known.kv_used_tokens)
        if self._engine_queues is None:
            return load
        waiting = known.waiting_requests
        return replace(load, queued_requests=waiting, running_requests=load.running_requests - waiting)
