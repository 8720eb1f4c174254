"""A replica's books while it decides by more than it counted itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from dualmap.research.unshared.load_view import KnownLoad
from dualmap.scheduling.steps import at_once
from dualmap.simulation.virtual_time.simulated_pool import NAME, PREFIX, SimulatedPool
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.memory.calls import MemoryCalls
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.scripts import load_scripts
from dualmap.statestore.records import InstanceRecord


class ShownCounts(Changes):
    """Adds what is known of other replicas to the records of instances, and takes it away again."""

    @classmethod
    def of(cls, pool: SimulatedPool) -> ShownCounts:
        """Over the books of a simulated replica."""
        calls = MemoryCalls(pool.memory.server, load_scripts(pool.scheduling), pool.now_ms)
        return cls(PoolKeys(PREFIX, NAME), calls)

    def records(self) -> dict[str, InstanceRecord]:
        """The records of all instances by id."""
        return at_once(self._records())

    async def _records(self) -> dict[str, InstanceRecord]:
        found = pairs_from(await self._calls.command("HGETALL", self._keys.instance_records))
        return {name.decode(): InstanceRecord.parse(record) for name, record in found.items()}

    @contextmanager
    def show(self, known: Mapping[str, KnownLoad]) -> Iterator[None]:
        """The records have the known loads until the end; what changes meanwhile stays changed."""
        counts = {name: load.growth for name, load in known.items() if load.growth}
        stamps = {name: load.stamps for name, load in known.items() if load.stamps}
        if not counts and not stamps:
            yield
            return
        before = self.records()
        own_stamps = {name: {field: getattr(before[name], field) for field in each} for name, each in stamps.items()}
        at_once(self._make(Change(instances=stamps, counts=counts, counted=True)))
        try:
            yield
        finally:
            less = {name: {field: -count for field, count in each.items()} for name, each in counts.items()}
            at_once(self._make(Change(instances=own_stamps, counts=less, counted=True)))
