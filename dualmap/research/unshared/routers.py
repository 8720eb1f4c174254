"""The router replicas of a run that share no store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from dualmap.research.unshared.fleet import UnsharedFleet
from dualmap.research.unshared.load_view import READ_VIEWS, LoadReadings, LoadView, SentLoad
from dualmap.research.unshared.shown_counts import ShownCounts
from dualmap.simulation.virtual_time.routers import MakeReplica, Routers
from dualmap.simulation.virtual_time.simulated_replica import SimulatedReplica


class UnsharedReplica(SimulatedReplica):
    """A replica with books of its own, which decides by its view of the load."""

    kind_of_fleet = UnsharedFleet
    learns_rates = False  # it sees no prefills but its own: the time between two of them is no rate
    fleet: UnsharedFleet

    def join(self, number: int, readings: LoadReadings) -> None:
        """Become the replica of this number, from 0, of those that are read together."""
        self.fleet.readings, self.fleet.number = readings, number
        self.fleet.shown = ShownCounts.of(self.pool)

    def sent(self) -> dict[str, SentLoad]:
        """The load that it has sent to the instances and that is not over, by id."""
        windows = {name: load.window_tokens for name, load in self.pool.loads().items()}
        records = self.fleet.shown.records()
        return {name: SentLoad(record, self.waiting[name], windows[name]) for name, record in records.items()}

    @contextmanager
    def _in_view(self) -> Iterator[None]:
        with self.fleet.in_view():
            yield
        self.leader.sweep_queues()  # what moved is granted by the replica's own window

    def rebalance_by_sweep(self) -> None:
        with self._in_view():
            super().rebalance_by_sweep()

    def give_idle_work(self) -> None:
        with self._in_view():
            super().give_idle_work()


@dataclass(frozen=True, slots=True)
class UnsharedRouters:
    """So many replicas with the same view."""

    replicas: int
    view: LoadView
    reading_interval_s: float = 1.0
    """Time between two readings of all instances' gauges, in the views that read them."""

    def __call__(self, make: MakeReplica, kv_used_tokens: Callable[[], Mapping[str, int]]) -> Routers:
        """The replicas of a run."""
        replicas = [make(UnsharedReplica) for _ in range(self.replicas)]
        readings = LoadReadings(self.view, [replica.sent for replica in replicas], kv_used_tokens)
        for number, replica in enumerate(replicas):
            replica.join(number, readings)
        return Routers(replicas, readings.read if self.view in READ_VIEWS else None, self.reading_interval_s)
