"""What a run counts beside its requests: moments of load, instance time, migrations and preemptions."""

from __future__ import annotations

from typing import NamedTuple

from scheduling.instance import InstanceState
from simulation.autoscaler import paid_instances
from simulation.cluster import Cluster
from simulation.results import LoadSample
from statestore.memory.state import PoolState


class Counters(NamedTuple):
    """What a run has counted so far."""

    migrations: int
    preemptions: int


class Watch:
    """Looks at a run's state and engines."""

    def __init__(self, state: PoolState, cluster: Cluster) -> None:
        self._state = state
        self._cluster = cluster
        self.samples: list[LoadSample] = []
        self.paid_s = 0.0
        """Instance seconds until now: ready, starting, or still answering."""
        self.at_first = self.at_last = Counters(0, 0)
        """At the first arrival that counts, and at the last."""

    def sample(self, now_s: float, paid_for_s: float) -> None:
        """Note the load, and that the fleet was paid for so long."""
        self.paid_s += paid_for_s * paid_instances(self._state)
        books = [book for _, book in sorted(self._state.instances.items()) if book.spec.state is InstanceState.READY]
        self.samples.append(
            LoadSample(
                now_s,
                tuple(book.pending_tokens for book in books),
                held_requests=sum(book.queued_requests for book in books),
                running_requests=sum(book.running_requests for book in books),
            )
        )

    def counters(self) -> Counters:
        engines = self._cluster.engines.values()
        preemptions = sum(engine.statistics().preemptions for engine in engines)
        return Counters(sum(self._state.migrations.values()), preemptions + self._cluster.former_preemptions)

    @property
    def leaks(self) -> int:
        """Staged KV that was not pulled in time."""
        return sum(engine.statistics().expired for engine in self._cluster.engines.values())
