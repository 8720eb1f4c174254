"""One run in virtual time: a trace through the scheduling code, the ledger and N engine models.

What decides here is what decides in production: policies, hotness tree and rebalance plans from ``scheduling``,
queues, dispatch window and KV metadata from ``statestore``'s ledger. What is left out is everything between
them: the network and the routers' own time are zero, and decisions see the state as it is.

The same trace, scenario and code give the same result to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from scheduling.blocks import cache_seed, chain_of_trace
from scheduling.chain import Chain
from scheduling.decision import Decision, Horizon, RouteQuery
from scheduling.errors import NoInstanceError
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.policies import build_policy
from scheduling.view import ClusterView
from simulation.choosing import choose
from simulation.cluster import Cluster
from simulation.engine_types import EngineConfig, EngineRequest, Event, EventKind, RequestRefusedError
from simulation.event_queue import EventQueue, Priority
from simulation.generators.calibration import cached_tokens_if_infinite
from simulation.leader import HotnessKeeper, Rebalancer
from simulation.results import LoadSample, RequestOutcome, RunRecord, RunResult, summarize
from simulation.scenario import UNLIMITED, Dispatch, FleetChange, Scenario
from simulation.traces import Trace, TraceRequest
from statestore.base import RequestState
from statestore.ledger import PoolLedger, upkeep
from statestore.reservation import Reservation, ReserveStatus

OnProgress = Callable[[int], None]

_REPLICA = "simulator"
_SEED = cache_seed("simulated")
_PROGRESS_EVERY = 100
OVERDUE_INTERVAL_S = 1.0
"""As a leader does it: see ``PoolStore.grant_overdue``."""


def simulate(
    trace: Trace, scenario: Scenario, on_progress: OnProgress | None = None, chains: Iterable[Chain] | None = None
) -> RunResult:
    """Run the whole trace and return its figures; ``on_progress`` hears how many requests have arrived.

    ``chains`` are what the scheduling code sees instead of the trace's own blocks, one a request in order (see
    ``simulation.routed_chains``); the engines' caches always work by the trace's blocks.
    """
    return summarize(Simulation(trace, scenario, on_progress, chains).run())


class _Counters(NamedTuple):
    """What a run has counted so far."""

    migrations: int
    preemptions: int


class Simulation:
    """The state of one run."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        on_progress: OnProgress | None = None,
        chains: Iterable[Chain] | None = None,
    ) -> None:
        self._trace = trace
        self._scenario = scenario
        self._on_progress = on_progress
        self._routed = iter(chains) if chains is not None else map(self._own_chain, trace.requests)
        settings = replace_block_tokens(scenario, trace.block_tokens)
        self._scheduling = settings.scheduling
        self._direct = scenario.dispatch_of is Dispatch.DIRECT
        self._policy = build_policy(settings.scheduling)
        self._ledger = PoolLedger(settings.scheduling)
        self._events = EventQueue()
        self._cluster = Cluster(self._events, self._on_engine_event, endless_cache=scenario.endless_cache)
        self._keeper = HotnessKeeper(settings, self._ledger)
        self._rebalancer = Rebalancer(settings, self._ledger, self._events)
        self._engine = settings.engine
        self._waiting: dict[str, int] = {}
        """Requests in each engine's own queue."""
        self._view: ClusterView | None = None
        self._chains: dict[str, Chain] = {}
        """Of live requests."""
        self._outcomes: list[RequestOutcome] = []
        self._samples: list[LoadSample] = []
        self._arrived = 0
        self._at_first = self._at_last = _Counters(0, 0)
        """At the first arrival that counts, and at the last."""

    def run(self) -> RunRecord:
        self._resize(0.0, self._scenario.instances)
        for change in self._scenario.changes:
            self._schedule_change(change)
        self._schedule_arrival()
        self._every(self._scenario.hotness_interval_s, Priority.LEADER, lambda _: self._keeper.tick())
        self._every(self._scenario.sample_interval_s, Priority.SAMPLE, self._sample)
        if self._policy.rebalances:
            self._every(self._scenario.rebalance_interval_s, Priority.LEADER, self._sweep)
        if self._scheduling.granting_order == "deadline":
            self._every(OVERDUE_INTERVAL_S, Priority.LEADER, self._grant_overdue)
        while len(self._events):
            now_s, action = self._events.pop()
            action(now_s)
        return self._record()

    # time --------------------------------------------------------------------------------------------------------
    def _every(self, interval_s: float, priority: Priority, action: Callable[[float], None], turn: int = 1) -> None:
        """Repeat while there is work; multiples of the interval, not sums, so that no error adds up."""

        def repeat(now_s: float) -> None:
            action(now_s)
            if self._chains or self._arrived < len(self._trace.requests):
                self._every(interval_s, priority, action, turn + 1)

        self._events.push(turn * interval_s, priority, repeat)

    def _schedule_arrival(self) -> None:
        if self._arrived < len(self._trace.requests):
            self._events.push(self._trace.requests[self._arrived].arrival_s, Priority.ARRIVAL, self._arrive)

    def _schedule_change(self, change: FleetChange) -> None:
        self._events.push(change.at_s, Priority.MEMBERSHIP, lambda now_s: self._resize(now_s, change.instances))

    # members -----------------------------------------------------------------------------------------------------
    def _resize(self, now_s: float, instances: int) -> None:
        """Make ``instances`` ready: add new ones, drain those beyond."""
        now_ms = int(now_s * 1000)
        wanted = {spec.instance_id: spec for spec in map(self._spec, range(instances))}
        for instance_id, spec in wanted.items():
            if instance_id not in self._ledger.accounts:
                self._cluster.add(instance_id, replace(self._engine, kv_capacity_tokens=spec.kv_capacity_tokens))
                self._waiting[instance_id] = 0
                self._ledger.put_instance(spec, now_ms)
            self._ledger.set_instance_state(instance_id, InstanceState.READY, now_ms)
        for instance_id in sorted(self._ledger.accounts.keys() - wanted.keys()):
            self._ledger.set_instance_state(instance_id, InstanceState.DRAINING, now_ms)
        self._dispatch_granted(now_s)

    def _spec(self, index: int) -> InstanceSpec:
        scenario = self._scenario
        spec = scenario.fleet[index] if scenario.fleet else self._made_up_spec(scenario.instance_name.format(index + 1))
        return replace(spec, dispatch_window_tokens=UNLIMITED, max_running_requests=UNLIMITED) if self._direct else spec

    def _made_up_spec(self, instance_id: str) -> InstanceSpec:
        return replace(
            self._engine.instance_spec(instance_id),
            dispatch_window_tokens=self._scenario.dispatch_window_tokens,
            max_queued_requests=self._scenario.max_queued_requests,
        )

    def _current_view(self) -> ClusterView:
        ledger, view = self._ledger, self._view
        if view is None or view.epoch != ledger.epoch or view.tree_version != ledger.tree_version:
            members = ledger.membership()
            view = self._view = ClusterView.build(
                epoch=members.epoch,
                tree_version=members.tree_version,
                instances=members.instances,
                tree=members.tree,
                virtual_nodes=self._scheduling.virtual_nodes,
                previous=view,
            )
        return view

    # the life of a request ---------------------------------------------------------------------------------------
    def _arrive(self, now_s: float) -> None:
        request = self._trace.requests[self._arrived]
        request_id = str(self._arrived)
        if self._arrived == self._scenario.skip_requests:
            self._at_first = self._counters()
        if self._arrived == len(self._trace.requests) - 1:
            self._at_last = self._counters()
        self._arrived += 1
        self._schedule_arrival()
        if self._on_progress is not None and self._arrived % _PROGRESS_EVERY == 0:
            self._on_progress(self._arrived)
        chain = next(self._routed)
        self._chains[request_id] = chain
        self._place(request_id, request, chain, now_s)
        self._rebalancer.listen(now_s)
        self._dispatch_granted(now_s)

    def _own_chain(self, request: TraceRequest) -> Chain:
        return chain_of_trace(request.hash_ids, request.input_tokens, _SEED, self._trace.block_tokens)

    def _place(self, request_id: str, request: TraceRequest, chain: Chain, now_s: float) -> None:
        """Decide and reserve, elsewhere where a queue is full. Nothing comes between the two: no decision is stale."""
        scheduling, view = self._scheduling, self._current_view()
        outcome = RequestOutcome(now_s, request.input_tokens, request.output_tokens, scheduling.slo_ttft_s)
        outcome.key_blocks = view.tree.key_blocks(chain, scheduling.max_key_blocks)
        self._outcomes.append(outcome)
        full: frozenset[str] = frozenset()
        while (decision := self._decide(request, chain, view, full, now_s)) is not None:
            outcome.expected_ttft_s = decision.expected_ttft_s
            outcome.expected_cached_tokens = max(0, request.input_tokens - decision.uncached_tokens)
            if self._scenario.late_requests == "refuse" and decision.expected_ttft_s > scheduling.slo_ttft_s:
                break
            status = self._reserve(request_id, request, chain, decision, now_s)
            if status is not ReserveStatus.QUEUE_FULL:
                outcome.chosen_id = decision.instance_id
                if status is ReserveStatus.DISPATCHED:
                    self._submit(request_id, decision.instance_id, now_s)
                return
            full |= {decision.instance_id}
        del self._chains[request_id]  # refused

    def _decide(
        self, request: TraceRequest, chain: Chain, view: ClusterView, excluded: frozenset[str], now_s: float
    ) -> Decision | None:
        """None if nobody is left to choose."""
        query = RouteQuery(
            chain,
            self._scheduling.slo_ttft_s,
            sequence=len(self._outcomes),
            expected_output_tokens=self._expected_output_tokens(request),
            excluded=excluded,
        )

        def look(instance_ids: Iterable[str], horizon: bool) -> tuple[Mapping[str, InstanceLoad], Horizon | None]:
            seen = self._ledger.observe(instance_ids, chain, int(now_s * 1000), horizon=horizon)
            return self._as_seen(seen.loads), seen.horizon

        try:
            return choose(self._policy, query, view, look)
        except NoInstanceError:
            if not excluded:
                raise
            return None

    def _reserve(
        self, request_id: str, request: TraceRequest, chain: Chain, decision: Decision, now_s: float
    ) -> ReserveStatus:
        reservation = Reservation(
            request_id=request_id,
            replica_id=_REPLICA,
            instance_id=decision.instance_id,
            chain=chain,
            uncached_tokens=decision.uncached_tokens,
            expected_output_tokens=self._expected_output_tokens(request),
            slo_ms=round(self._scheduling.slo_ttft_s * 1000),
            alternative_id=decision.alternative_id,
            alternative_uncached_tokens=decision.alternative_uncached_tokens,
            overloaded=decision.overloaded,
            ttft_features=decision.ttft_features,
        )
        return self._ledger.reserve(reservation, int(now_s * 1000)).status

    def _expected_output_tokens(self, request: TraceRequest) -> int:
        expected_tokens = self._scheduling.expected_output_tokens
        return min(request.output_tokens, expected_tokens) if self._scenario.output_limits_known else expected_tokens

    def _as_seen(self, loads: Mapping[str, InstanceLoad]) -> dict[str, InstanceLoad]:
        if not self._direct:
            return dict(loads)
        return {instance_id: self._with_engine_queue(load) for instance_id, load in loads.items()}

    def _with_engine_queue(self, load: InstanceLoad) -> InstanceLoad:
        """Without a queue in the fleet, what waits is what waits in the engine, as its metrics would tell at once."""
        waiting = self._waiting[load.instance_id]
        return replace(load, queued_requests=waiting, running_requests=load.running_requests - waiting)

    def _submit(self, request_id: str, instance_id: str, now_s: float) -> None:
        outcome, traced = self._outcomes[int(request_id)], self._trace.requests[int(request_id)]
        outcome.instance_id, outcome.dispatched_s = instance_id, now_s
        # Equal ids mean equal prefixes already: the engine needs no hashes of them.
        full_blocks = traced.hash_ids[: traced.input_tokens // self._trace.block_tokens]
        request = EngineRequest(request_id, traced.input_tokens, max(1, traced.output_tokens), full_blocks)
        self._waiting[instance_id] += 1
        try:
            self._cluster.submit(instance_id, request, now_s)
        except RequestRefusedError:
            self._waiting[instance_id] -= 1
            self._ledger.finish(request_id, int(now_s * 1000))
            del self._chains[request_id]

    def _dispatch_granted(self, now_s: float) -> None:
        while grants := self._ledger.take_grants():
            for _, grant in grants:
                self._submit(grant.request_id, grant.instance_id, now_s)

    def _on_engine_event(self, instance_id: str, event: Event) -> None:
        match event.kind:
            case EventKind.SCHEDULED:
                self._waiting[instance_id] -= 1
            case EventKind.PREEMPTED:
                self._waiting[instance_id] += 1
            case EventKind.FIRST_TOKEN:
                outcome = self._outcomes[int(event.request_id)]
                outcome.first_token_s, outcome.cached_tokens = event.time_s, event.tokens
                chain = self._chains[event.request_id]
                self._ledger.first_token(event.request_id, instance_id, chain, int(event.time_s * 1000))
            case EventKind.FINISHED:
                self._outcomes[int(event.request_id)].finish_s = event.time_s
                self._ledger.finish(event.request_id, int(event.time_s * 1000))
                del self._chains[event.request_id]
        self._dispatch_granted(event.time_s)

    # watching ----------------------------------------------------------------------------------------------------
    def _sweep(self, now_s: float) -> None:
        self._rebalancer.sweep(now_s)
        self._dispatch_granted(now_s)

    def _grant_overdue(self, now_s: float) -> None:
        self._refuse_late(int(now_s * 1000))
        upkeep.grant_overdue(self._ledger, int(now_s * 1000))
        self._dispatch_granted(now_s)

    def _refuse_late(self, now_ms: int) -> None:
        """Turn away who stepped behind while held and is not served late, as the routers do at their looks."""
        refuses_all = self._scenario.late_requests == "refuse"
        for account in self._ledger.accounts.values():
            for request in [*account.late]:
                if request.state is RequestState.HELD and (refuses_all or request.surplus):  # others may go meanwhile
                    self._ledger.finish(request.request_id, now_ms)
                    del self._chains[request.request_id]

    def _sample(self, now_s: float) -> None:
        accounts = [a for _, a in sorted(self._ledger.accounts.items()) if a.spec.state is InstanceState.READY]
        self._samples.append(
            LoadSample(
                now_s,
                tuple(account.pending_tokens for account in accounts),
                held_requests=sum(account.held_requests for account in accounts),
                running_requests=sum(len(account.running) for account in accounts),
            )
        )

    def _counters(self) -> _Counters:
        engines = self._cluster.engines.values()
        preemptions = sum(engine.statistics().preemptions for engine in engines)
        return _Counters(sum(self._ledger.migrations.values()), preemptions)

    def _record(self) -> RunRecord:
        return RunRecord(
            policy=self._scheduling.policy,
            trace=self._trace.name,
            instances=self._scenario.instances,
            rate_per_s=self._trace.rate_per_s,
            outcomes=self._outcomes,
            samples=self._samples,
            infinite_cached_tokens=cached_tokens_if_infinite(self._trace),
            migrations=self._at_last.migrations - self._at_first.migrations,
            preemptions=self._at_last.preemptions - self._at_first.preemptions,
            skip_requests=self._scenario.skip_requests,
            labels=self._scenario.labels,
        )


def replace_block_tokens(scenario: Scenario, block_tokens: int) -> Scenario:
    """The scenario with the trace's block size everywhere: it is what the trace knows of its prefixes."""
    engine: EngineConfig = replace(scenario.engine, block_tokens=block_tokens)
    scheduling = scenario.scheduling.model_copy(update={"block_tokens": block_tokens})
    return replace(scenario, engine=engine, scheduling=scheduling)
