"""One pool as a replica serves it: the parts that its requests share."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dualmap.router.pool.adapter_loads import AdapterLoads
from dualmap.router.pool.contexts_ahead import ContextsAhead
from dualmap.router.pool.evictable_answers import EvictableAnswers
from dualmap.router.pool.failover import FailoverPool
from dualmap.router.pool.grant_waiters import GrantWaiters
from dualmap.router.pool.instance_loss import InstanceLossNotifier
from dualmap.router.pool.instance_waiters import InstanceWaiters
from dualmap.router.pool.model_lists import ModelLists
from dualmap.router.pool.outbox import Outbox
from dualmap.router.pool.pool_fleet import PoolFleet
from dualmap.router.pool.queue_planner import QueuePlanner
from dualmap.router.pool.recent_answers import RecentAnswers
from dualmap.router.pool.revision_choice import RevisionChoice
from dualmap.router.pool.revision_counts import RevisionCounts
from dualmap.router.pool.stored_responses import StoredResponses
from dualmap.router.pool.turn_waiters import TurnWaiters
from dualmap.router.pool.view import ViewKeeper
from dualmap.router.prompts.prompt import PromptTokenizer
from dualmap.router.telemetry.metrics import PoolMetrics
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.placing.decision import Policy, holds
from dualmap.scheduling.placing.placement import Observation, Placement, PlaceReply
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import BlockRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.machine import RequestRules
from dualmap.scheduling.request.passed_on import PassedOnBalancer
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.settings import SchedulingSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SearchCalls:
    """The calls that a search makes: those of the store, and the renewal of the view."""

    place: Callable[[Placement], Awaitable[PlaceReply]]
    observe: Callable[[Sequence[str], Chain], Awaitable[Observation]]
    refresh: Callable[[], Awaitable[object]]


@dataclass(kw_only=True, slots=True)
class ServedPool:
    settings: PoolSettings
    scheduling: SchedulingSettings
    store: FailoverPool
    view: ViewKeeper
    loss_notifier: InstanceLossNotifier
    grant_waiters: GrantWaiters
    turn_waiters: TurnWaiters
    instance_waiters: InstanceWaiters
    fleet: PoolFleet
    planner: QueuePlanner
    outbox: Outbox
    policy: Policy
    evidence: Evidence
    metrics: PoolMetrics
    blocks: BlockRule
    recent_answers: RecentAnswers
    contexts_ahead: ContextsAhead
    model_lists: ModelLists
    adapter_loads: AdapterLoads
    replica_id: str
    max_tries: int
    pairs_legs: bool = False
    """Both legs of a request are placed before it is sent, whatever the connector needs."""
    tokenizer: PromptTokenizer | None = None
    """None: prompts that are text are cut by bytes."""
    evictable: EvictableAnswers = field(default_factory=EvictableAnswers)
    stored_responses: StoredResponses = field(init=False)
    revision_choice: RevisionChoice = field(init=False)
    revision_counts: RevisionCounts = field(default_factory=RevisionCounts)
    shadow_counts: RevisionCounts = field(default_factory=RevisionCounts)
    """What copies of requests showed, and those that they are copies of."""
    placing: SearchCalls = field(init=False)
    rules: RequestRules = field(init=False)
    """Rules by which a request that arrives now is served."""
    waiting_room: WaitingRoom | None = field(init=False)
    """Where requests wait for the first instance; None where the pool is to have some at all times."""
    chooses: bool = False
    """A request may go elsewhere than to any instance here: to one of a revision, or to the pool that stands in."""
    _balancer: PassedOnBalancer = field(default_factory=PassedOnBalancer)

    def __post_init__(self) -> None:
        self.waiting_room = WaitingRoom.of(self.settings.autoscale)
        self.stored_responses = StoredResponses(self.store)
        self.revision_choice = RevisionChoice(self.store, self.view)
        self.placing = SearchCalls(self.store.place, self.store.observe, self.view.refresh)
        self._schedule_by(self.scheduling)

    def _schedule_by(self, scheduling: SchedulingSettings) -> None:
        self.scheduling = scheduling
        self.rules = RequestRules(
            replica_id=self.replica_id,
            fleet=self.fleet,
            policy=self.policy,
            order=self.grant_waiters.order,
            scheduling=scheduling,
            at_once=not holds(self.policy, self.grant_waiters.order),
            refuses_late=self.grant_waiters.refuses_late,
            max_tries=self.max_tries,
            decode_first=self.pairs_legs or self.settings.connector == "mooncake-layerwise",
            staged_timeout_s=self.settings.staged_timeout_s,
            transfer_timeout_s=self.settings.transfer_timeout_s,
            evidence=self.evidence,
            balancer=self._balancer,
            waiting_room=self.waiting_room,
        )

    def follow(self, overrides: Mapping[str, Any]) -> None:
        """Apply what was read from the store: scheduling settings that were changed in the running fleet, and the size
        of the engines' blocks."""
        self.chooses = self.view.revisions.in_force or self.settings.fallback is not None
        if self.view.view.block_tokens != self.blocks.engine_block_tokens:
            self.blocks = replace(self.blocks, engine_block_tokens=self.view.view.block_tokens)
        scheduling = self.store.settings.in_force(overrides)
        if scheduling != self.scheduling:
            self.policy, self.grant_waiters.order = build_policy(scheduling), queue_order_of(scheduling)
            self._schedule_by(scheduling)
            log.warning("pool %s: scheduling settings changed: %s", self.settings.name, dict(overrides))

    def forget_departed(self) -> None:
        """Drop what is kept about instances that left the fleet."""
        self.evidence.forget_all_but(self.view.view.instances)
        self.model_lists.forget_all_but(self.view.view.instances)
        self.adapter_loads.forget_all_but(self.view.view.instances)
        self.fleet.forget_departed()
