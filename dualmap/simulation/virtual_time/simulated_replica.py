"""One router replica of a run: its books and its copy of the members, its leader's rounds, and its live requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from dualmap.scheduling.estimates.kv_tiers import InstanceTiers
from dualmap.scheduling.placing.decision import Policy
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.request.breaker import BreakerRule
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.machine import RequestMachine, RequestRules
from dualmap.scheduling.request.quarantine import Quarantine
from dualmap.scheduling.request.retry_budget import RETRIES_PER_S, RETRY_SHARE, RetryBudget
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.steps import at_once
from dualmap.simulation.virtual_time.event_queue import EventQueue
from dualmap.simulation.virtual_time.leader import Leader
from dualmap.simulation.virtual_time.reported_caches import ReportedCaches
from dualmap.simulation.virtual_time.request_driver import OnMachine, RequestDriver
from dualmap.simulation.virtual_time.scenario import Dispatch, Scenario
from dualmap.simulation.virtual_time.simulated_fleet import SimulatedFleet
from dualmap.simulation.virtual_time.simulated_pool import REPLICA, SimulatedPool


class SimulatedReplica:
    """Replicas that share a store are one here, since the network is left out."""

    kind_of_fleet: ClassVar[type[SimulatedFleet]] = SimulatedFleet
    learns_rates: ClassVar[bool] = True
    """Whether the leader learns prefill rates; else they stay as instances are described."""

    def __init__(
        self,
        settings: Scenario,
        policy: Policy,
        order: QueueOrder,
        events: EventQueue,
        *,
        now_s: Callable[[], float],
        arrived: Callable[[], int],
        kv_used_tokens: Callable[[str], int],
        waiting_room: WaitingRoom | None,
        send: OnMachine,
        left: OnMachine,
        ended: OnMachine,
        stop: Callable[[RequestMachine], int],
    ) -> None:
        """``send``, ``left``, ``ended`` and ``stop`` are those of the ``RequestDriver``."""
        direct = settings.dispatch_of is Dispatch.DIRECT
        self.waiting: dict[str, int] = {}
        """Requests that it sent and that are in each engine's own queue."""
        self.pool = SimulatedPool(settings.scheduling, lambda: int(now_s() * 1000))
        breakers = CircuitBreakers(BreakerRule(), view=lambda: self.fleet.view)
        retries = RetryBudget(RETRY_SHARE, RETRIES_PER_S, 0.0, arrived)
        self.fleet = self.kind_of_fleet(
            self.pool, self.waiting if direct else None, kv_used_tokens, breakers=breakers, now_s=now_s
        )
        self.rules = RequestRules(
            replica_id=REPLICA,
            fleet=self.fleet,
            policy=policy,
            order=order,
            scheduling=settings.scheduling,
            at_once=direct,
            refuses_late=settings.refuses_late,
            decode_first=settings.decode_first,
            evidence=Evidence(breakers, Quarantine(), retries),
            waiting_room=waiting_room,
        )
        self.leader = Leader(settings, self.fleet, order, events, learns_rates=self.learns_rates)
        self.reported = ReportedCaches(self.pool) if settings.kv_events else None
        self.requests = RequestDriver(
            self.fleet, self.rules, events, now_s=now_s, send=send, left=left, ended=ended, stop=stop
        )

    def resize(self, wanted: Mapping[str, InstanceSpec], tiers: Mapping[str, InstanceTiers]) -> None:
        """Make these instances ready, new ones among them, with their tiers, and drain the others."""
        pool, known = self.pool, self.pool.members.instances
        for instance_id, spec in wanted.items():
            if instance_id not in known:
                self.waiting[instance_id] = 0
                pool.put_instance(spec)
                at_once(pool.store.tiers.describe(instance_id, tiers[instance_id]))
            pool.set_instance_state(instance_id, InstanceState.READY)
        for instance_id in sorted(known.keys() - wanted.keys()):
            pool.set_instance_state(instance_id, InstanceState.DRAINING)

    def rebalance_by_sweep(self) -> None:
        self.leader.rebalance_by_sweep()

    def give_idle_work(self) -> None:
        self.leader.give_idle_work()
