"""Counts of a run beside its requests: moments of load, instance time, migrations and preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.steps import at_once
from dualmap.simulation.figures.results import LoadSample
from dualmap.simulation.virtual_time.autoscaler import paid_instances
from dualmap.simulation.virtual_time.cluster import Cluster
from dualmap.simulation.virtual_time.simulated_pool import SimulatedPool


class Counters(NamedTuple):
    """Counts of a run so far."""

    migrations: int
    preemptions: int
    adapter_loads: int = 0
    adapter_disk_loads: int = 0


class Watch:
    """Looks at a run's engines, and at the pool in the books of each replica."""

    def __init__(self, pools: Sequence[SimulatedPool], cluster: Cluster) -> None:
        self._pools = pools
        self._cluster = cluster
        self.samples: list[LoadSample] = []
        self.paid_s = 0.0
        """Instance seconds until now: ready, starting, or still answering."""
        self.at_first = self.at_last = Counters(0, 0)
        """Counters at the first arrival that counts, and at the last."""

    def sample(self, now_s: float, paid_for_s: float) -> None:
        """Note the load, and that the fleet was paid for so long."""
        booked = [pool.loads() for pool in self._pools]
        loads = booked[0].values()
        self.paid_s += paid_for_s * paid_instances(loads)
        ready = [load.instance_id for load in loads if load.state is InstanceState.READY]
        self.samples.append(
            LoadSample(
                now_s,
                tuple(sum(book[name].pending_tokens for book in booked) for name in ready),
                held_requests=sum(book[name].queued_requests for book in booked for name in ready),
                running_requests=sum(book[name].running_requests for book in booked for name in ready),
            )
        )

    def counters(self) -> Counters:
        engines = self._cluster.engines.values()
        preemptions = sum(engine.statistics().preemptions for engine in engines)
        loads = [engine.statistics().adapter_loads for engine in engines]
        return Counters(
            sum(sum(at_once(pool.store.overview()).migrations.values()) for pool in self._pools),
            preemptions + self._cluster.former_preemptions,
            sum(each.to_device for each in loads),
            sum(each.from_disk for each in loads),
        )

    @property
    def leaks(self) -> int:
        """The number of staged KVs that were not pulled in time."""
        return sum(engine.statistics().expired for engine in self._cluster.engines.values())
