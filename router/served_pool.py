"""One pool as a replica serves it: the parts that its requests share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from router.breakers import CircuitBreakers
from router.grant_waiters import GrantWaiters
from router.instance_loss import InstanceLossNotifier
from router.metrics import PoolMetrics
from router.placement_limiter import PlacementLimiter
from router.quarantine import Quarantine
from router.view import ViewKeeper
from scheduling.blocks import BlockRule
from scheduling.decision import Policy
from scheduling.instance import DEFAULT_PREFILL_TOKENS_PER_S, InstanceLoad
from scheduling.settings import SchedulingSettings
from statestore.base import PoolStore
from statestore.last_seen import LastSeenLoads
from statestore.settings import PoolSettings


@dataclass(slots=True)
class ServedPool:
    settings: PoolSettings
    scheduling: SchedulingSettings
    store: PoolStore
    view: ViewKeeper
    loss_notifier: InstanceLossNotifier
    grant_waiters: GrantWaiters
    placement_limiter: PlacementLimiter
    policy: Policy
    reserves_idle: bool
    """Whether a placement that leaves nothing to weigh is reserved as the candidates are looked at."""
    breakers: CircuitBreakers
    quarantine: Quarantine
    metrics: PoolMetrics
    blocks: BlockRule
    last_seen: LastSeenLoads = field(default_factory=LastSeenLoads)
    """The load of each instance as a decision of this replica saw it last."""
    busy: set[str] = field(default_factory=set)
    """Instances that had prefill pending when a decision of this replica weighed them last."""

    def weighed(self, loads: Mapping[str, InstanceLoad]) -> None:
        """A decision of a pool that ``reserves_idle`` looks at them now."""
        for instance_id, load in loads.items():
            if load.pending_tokens > 0:
                self.busy.add(instance_id)
            else:
                self.busy.discard(instance_id)

    def may_be_idle(self, candidates: tuple[str, ...]) -> bool:
        """Whether it is worth it to ask for a reservation of one of them before anything is weighed: by what was seen
        last, which the next look puts right."""
        return self.reserves_idle and not self.busy.issuperset(candidates)

    def forget_departed(self) -> None:
        """Drop what is kept about instances that left the fleet."""
        members = self.view.view.instances
        self.breakers.forget_all_but(members)
        self.last_seen.forget_all_but(members.keys())
        self.busy &= members.keys()

    def expected_wait_s(self, instance_id: str) -> float:
        """Time until the instance has prefilled what is pending on it, by its last seen load."""
        load = self.last_seen.get(instance_id)
        return load.pending_tokens / max(1.0, load.prefill_tokens_per_s) if load is not None else 1.0

    def dispatched_tokens(self, instance_id: str) -> int:
        """Tokens on their way through the instance's prefill, as last seen."""
        load = self.last_seen.get(instance_id)
        return load.dispatched_tokens if load is not None else 0

    def prefill_rate(self, instance_id: str) -> float:
        """Prefill rate in tokens per second, as last seen; before that, the instance's prior."""
        load = self.last_seen.get(instance_id)
        if load is not None:
            return load.prefill_tokens_per_s
        spec = self.view.view.instances.get(instance_id)
        return spec.prefill_tokens_per_s if spec is not None else DEFAULT_PREFILL_TOKENS_PER_S
