"""The pool's store as its leader's rounds use it: every write carries the fence."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.learning import DisprovedTier, Sample
from dualmap.scheduling.queues.granting import CommitReply
from dualmap.scheduling.queues.queue_order import QueueHead, QueuePlan
from dualmap.scheduling.queues.rebalance import HotQueue, Migration
from dualmap.scheduling.scaling.scale_job import ActuatorReply, FleetNow
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.hotness import Arrival, HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.request import StoredRequest
from dualmap.statestore.pool import PoolStore


class LedPool:
    """The port of ``scheduling.queues.leader_jobs``."""

    def __init__(self, pool: PoolStore, fence: int) -> None:
        self._pool = pool
        self._fence = fence

    # queues
    def queue_head(self, instance_id: str) -> Awaitable[QueueHead | None]:
        return self._pool.queue_head(instance_id)

    def queue(self, instance_id: str) -> Awaitable[HotQueue | None]:
        return self._pool.queues.queue(instance_id)

    def commit(self, plan: QueuePlan) -> Awaitable[CommitReply]:
        """A plan needs no fence: it is refused where another one was faster."""
        return self._pool.commit(plan)

    def migrate(self, request: StoredRequest, target_id: str, *, reason: str) -> Awaitable[Migration]:
        return self._pool.queues.migrate(request, target_id, reason=reason, fence=self._fence)

    # logs and what is made of them
    def arrivals(self, after: str, limit: int) -> Awaitable[Sequence[Arrival]]:
        return self._pool.publications.arrivals(after, limit)

    def samples(self, after: str, limit: int) -> Awaitable[Sequence[Sample]]:
        return self._pool.publications.samples(after, limit)

    def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int]) -> Awaitable[int]:
        return self._pool.publications.publish_tree(tree, counts, fence=self._fence)

    def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float]) -> Awaitable[None]:
        return self._pool.publications.publish_learned(learned, tokens_per_s, fence=self._fence)

    def correct_tier(self, disproved: DisprovedTier) -> Awaitable[None]:
        return self._pool.tiers.correct(disproved, fence=self._fence)

    # the size of the fleet
    def scaling(self, role: str) -> Awaitable[ScaleRecord]:
        return self._pool.publications.scaling(role)

    def record_scaling(self, record: ScaleRecord, entry: ScaleEntry) -> Awaitable[None]:
        return self._pool.publications.record_scaling(record, entry, fence=self._fence)

    def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Awaitable[Mapping[str, Sequence[int]]]:
        return self._pool.publications.recent_blocks(instance_ids, limit)

    def set_instance_state(
        self, instance_id: str, state: InstanceState, *, expected: InstanceState | None = None
    ) -> Awaitable[bool]:
        return self._pool.members.set_instance_state(instance_id, state, expected=expected, fence=self._fence)


class LedScaling:
    """The port of ``scheduling.scaling.scale_job``: a leader's pool, a view of the fleet, and an actuator."""

    def __init__(
        self,
        led: LedPool,
        *,
        now: Callable[[], Awaitable[FleetNow]],
        actuate: Callable[[ScaleRecord], Awaitable[ActuatorReply | None]],
    ) -> None:
        """``actuate`` gives None while the actuator works."""
        self.now = now
        self.actuate = actuate
        self.scaling = led.scaling
        self.record_scaling = led.record_scaling
        self.recent_blocks = led.recent_blocks
        self.set_instance_state = led.set_instance_state
