"""One run in virtual time: a trace through the scheduling code, the pool's store and N engine models.

What decides here is what decides in production: the search for an instance, the queue plans and the leader's rounds of
``scheduling``, over the scripts and books of the store, within this process. Everything between them is left out: the
network and the routers' own time are zero, and decisions see the state as it is.

The same trace, scenario and code give the same result to the last digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.placing.placement import PlaceStatus
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import cache_seed, chain_of_trace
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant, grant_queue
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg, decode_leg_id, request_id_of
from dualmap.scheduling.steps import drive_now
from dualmap.simulation.autoscale import Autoscale
from dualmap.simulation.autoscaler import INTERVAL_S as SCALING_INTERVAL_S
from dualmap.simulation.autoscaler import SimulatedAutoscaler
from dualmap.simulation.cluster import Cluster, KvSource
from dualmap.simulation.engine_types import EngineRequest, Event, EventKind, RequestRefusedError
from dualmap.simulation.event_queue import EventQueue, Priority
from dualmap.simulation.generators.calibration import cached_tokens_if_infinite
from dualmap.simulation.leader import Leader
from dualmap.simulation.learning_notes import TransferTimes, end_note, first_token_note
from dualmap.simulation.reported_caches import ReportedCaches
from dualmap.simulation.results import RequestOutcome, RunRecord, RunResult, summarize
from dualmap.simulation.router_queue import Pressure, RouterQueue
from dualmap.simulation.scenario import Dispatch, FleetChange, Scenario
from dualmap.simulation.searches import Searches
from dualmap.simulation.simulated_fleet import SimulatedFleet
from dualmap.simulation.simulated_pool import SimulatedPool
from dualmap.simulation.traces import Trace, TraceRequest
from dualmap.simulation.watch import Watch

OnProgress = Callable[[int], None]

_SEED = cache_seed("simulated")
_PROGRESS_EVERY = 100
LEARNING_INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 1.0
"""Of the leader's rounds over the queues, and of the refusal of what was held too long."""


def simulate(
    trace: Trace, scenario: Scenario, on_progress: OnProgress | None = None, chains: Iterable[Chain] | None = None
) -> RunResult:
    """Run the whole trace and return its figures; ``on_progress`` gets the number of requests that have arrived.

    ``chains`` are what the scheduling code sees instead of the trace's own blocks, one a request in order (see
    ``simulation.routed_chains``); the engines' caches always work by the trace's blocks.
    """
    return summarize(Simulation(trace, scenario, on_progress, chains).run())


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
        settings = scenario.in_blocks_of(trace.block_tokens)
        self._scheduling = settings.scheduling
        self._direct = scenario.dispatch_of is Dispatch.DIRECT
        self._policy = build_policy(settings.scheduling)
        self._order = queue_order_of(settings.scheduling)
        self._now_s = 0.0
        self._pool = SimulatedPool(settings.scheduling, lambda: int(self._now_s * 1000))
        self._waiting: dict[str, int] = {}
        """Requests in each engine's own queue."""
        self._fleet = SimulatedFleet(self._pool, self._waiting if self._direct else None, self._kv_used_tokens)
        self._searches = Searches(
            self._fleet, settings.scheduling, self._policy, self._order, scenario.refuses_late, self._direct
        )
        self._events = EventQueue()
        self._reported = ReportedCaches(self._pool) if scenario.kv_events else None
        self._cluster = Cluster(
            self._events,
            self._on_engine_event,
            settings.engine.transfer,
            endless_cache=scenario.endless_cache,
            reported=self._reported,
        )
        self._watch = Watch(self._pool, self._cluster)
        self._autoscaler: SimulatedAutoscaler | None = None
        self._leader = Leader(settings, self._fleet, self._order, self._events)
        self._engine = settings.engine
        rule = scenario.router_queue
        self._router_queue = None if rule is None else RouterQueue(rule, settings.engine.max_num_batched_tokens)
        self._parked: dict[int, Chain] = {}
        """Chains of the requests in the router's own queue, by number."""
        self._live: dict[str, Leg] = {}
        """Requests that the store has, and legs, each with what it is."""
        self._features: dict[str, Form] = {}
        """Of live requests whose first token is to be learned from."""
        self._split_chains: dict[str, Chain] = {}
        """Of split requests, until their decode leg begins."""
        self._transfers = TransferTimes()
        self._outcomes: list[RequestOutcome] = []
        self._arrived = 0

    def run(self) -> RunRecord:
        scenario, leader = self._scenario, self._leader
        self._resize(scenario.instances)
        for change in scenario.changes:
            self._schedule_change(change)
        self._cluster.schedule_speeds(scenario.speed_changes, self._engine.costs)
        if scenario.autoscale is not None:
            self._autoscaler = self._made_elastic(scenario.autoscale)
            self._every(SCALING_INTERVAL_S, Priority.LEADER, self._autoscaler.tick)
        self._schedule_arrival()
        self._every(scenario.hotness_interval_s, Priority.LEADER, leader.grow_tree)
        self._every(LEARNING_INTERVAL_S, Priority.LEADER, leader.learn)
        self._every(scenario.sample_interval_s, Priority.SAMPLE, self._sample)
        if self._policy.rebalances:
            self._every(scenario.rebalance_interval_s, Priority.LEADER, leader.rebalance_by_sweep)
        elif scenario.idle_work and self._order.by_deadline:
            self._every(scenario.rebalance_interval_s, Priority.LEADER, leader.give_idle_work)
        self._every(SWEEP_INTERVAL_S, Priority.LEADER, self._sweep)
        while len(self._events):
            self._now_s, action = self._events.pop()
            action(self._now_s)
            self._deliver_grants()
        return self._record()

    # time --------------------------------------------------------------------------------------------------------
    def _every(self, interval_s: float, priority: Priority, action: Callable[[], None], turn: int = 1) -> None:
        """Repeat while there is work; multiples of the interval, not sums, so that no error adds up."""

        def repeat(_: float) -> None:
            action()
            if self._live or self._arrived < len(self._trace.requests):
                self._every(interval_s, priority, action, turn + 1)

        self._events.push(turn * interval_s, priority, repeat)

    def _schedule_arrival(self) -> None:
        if self._arrived < len(self._trace.requests):
            self._events.push(self._trace.requests[self._arrived].arrival_s, Priority.ARRIVAL, self._arrive)

    def _schedule_change(self, change: FleetChange) -> None:
        self._events.push(change.at_s, Priority.MEMBERSHIP, lambda _: self._resize(change.instances))

    # members -----------------------------------------------------------------------------------------------------
    def _resize(self, instances: int) -> None:
        """Make ``instances`` ready: add new ones, drain those beyond."""
        wanted = {spec.instance_id: spec for spec in map(self._scenario.spec, range(instances))}
        for instance_id, spec in wanted.items():
            if instance_id not in self._pool.members.instances:
                self._renew(spec)
                self._waiting[instance_id] = 0
                self._pool.put_instance(spec)
            self._pool.set_instance_state(instance_id, InstanceState.READY)
        for instance_id in sorted(self._pool.members.instances.keys() - wanted.keys()):
            self._pool.set_instance_state(instance_id, InstanceState.DRAINING)

    def _made_elastic(self, autoscale: Autoscale) -> SimulatedAutoscaler:
        spares = list(map(self._scenario.spec, range(self._scenario.instances, autoscale.settings.max_instances)))
        self._waiting |= {spec.instance_id: 0 for spec in spares}
        return SimulatedAutoscaler(
            autoscale, self._fleet, self._leader, self._order, self._events, spares, self._renew, lambda: self._arrived
        )

    def _renew(self, spec: InstanceSpec) -> None:
        self._cluster.add(spec.instance_id, replace(self._engine, kv_capacity_tokens=spec.kv_capacity_tokens))

    # the life of a request ---------------------------------------------------------------------------------------
    def _arrive(self, now_s: float) -> None:
        request = self._trace.requests[self._arrived]
        request_id = str(self._arrived)
        if self._arrived == self._scenario.skip_requests:
            self._watch.at_first = self._watch.counters()
        if self._arrived == len(self._trace.requests) - 1:
            self._watch.at_last = self._watch.counters()
        self._arrived += 1
        self._schedule_arrival()
        if self._on_progress is not None and self._arrived % _PROGRESS_EVERY == 0:
            self._on_progress(self._arrived)
        chain = next(self._routed)
        if self._reported is not None:
            self._reported.route(request.hash_ids, chain.hashes)
        outcome = self._new_outcome(request, chain)
        queue = self._router_queue
        if queue is not None and (queue or self._router_holds(queue)):
            self._parked[self._arrived - 1] = chain
            queue.park(self._arrived - 1, now_s, request.input_tokens, outcome.slo_s)
            return
        self._place(request_id, request, chain)
        self._leader.listen(now_s)

    def _new_outcome(self, request: TraceRequest, chain: Chain) -> RequestOutcome:
        target_s = slo_s(self._scheduling, chain.prompt_tokens, request.slo_ttft_s)
        outcome = RequestOutcome(self._now_s, request.input_tokens, request.output_tokens, target_s)
        self._outcomes.append(outcome)
        return outcome

    def _router_holds(self, queue: RouterQueue) -> bool:
        loads = self._pool.loads()
        return queue.holds(self._pressure(loads[instance_id]) for instance_id in self._fleet.view.ready)

    def _pressure(self, load: InstanceLoad) -> Pressure:
        kv_use = self._kv_used_tokens(load.instance_id) / max(1, load.kv_capacity_tokens)
        return Pressure(load.pending_tokens, self._waiting[load.instance_id], kv_use)

    def _kv_used_tokens(self, instance_id: str) -> int:
        return self._cluster.engines[instance_id].kv_used_tokens

    def _release_parked(self) -> None:
        """Route what the router's own queue holds, as far as instances have room again."""
        queue = self._router_queue
        while queue and not self._router_holds(queue):
            number = queue.take()
            self._place(str(number), self._trace.requests[number], self._parked.pop(number))

    def _own_chain(self, request: TraceRequest) -> Chain:
        return chain_of_trace(request.hash_ids, request.input_tokens, _SEED, self._trace.block_tokens)

    def _place(self, request_id: str, request: TraceRequest, chain: Chain) -> None:
        """Search and reserve, as a router does; a request that no instance takes is refused."""
        outcome = self._outcomes[int(request_id)]
        outcome.key_blocks = self._fleet.view.tree.key_blocks(chain, self._scheduling.max_key_blocks)
        search = self._searches.of_request(request_id, chain, outcome.slo_s, self._output_limit(request_id))
        placed = self._searches.run(search)
        if search.rounds:
            decision = search.rounds[-1].decision
            outcome.expected_ttft_s = decision.expected_ttft_s
            outcome.expected_cached_tokens = max(0, request.input_tokens - decision.uncached_tokens)
        if placed is None:
            return
        outcome.chosen_id = placed.decision.instance_id
        self._live[request_id] = placed.reply.leg
        self._features[request_id] = placed.features(chain, self._scheduling.decode_stall_s)
        if placed.reply.leg is Leg.PREFILL:
            self._split_chains[request_id] = chain
        if placed.reply.status is PlaceStatus.DISPATCHED:
            self._dispatch(request_id, outcome.chosen_id)
        else:
            self._grant_from(placed.reply.queue)

    def _output_limit(self, leg_id: str) -> int:
        return self._traced(leg_id).output_tokens if self._scenario.output_limits_known else 0

    def _submit(self, leg_id: str, instance_id: str, source: KvSource | None = None) -> bool:
        """Send a request, or a leg of one, to its engine; ``source`` is where a decode leg finds its KV. False if the
        engine refused it."""
        traced, prefills = self._traced(leg_id), self._live[leg_id] is Leg.PREFILL
        # Equal ids mean equal prefixes already: the engine needs no hashes of them.
        full_blocks = traced.hash_ids[: traced.input_tokens // self._trace.block_tokens]
        output_tokens = 1 if prefills else max(1, traced.output_tokens)
        request = EngineRequest(
            leg_id, traced.input_tokens, output_tokens, full_blocks, stages_kv=prefills, awaits_kv=source is not None
        )
        self._waiting[instance_id] += 1
        try:
            self._cluster.submit(instance_id, request, self._now_s, source)
        except RequestRefusedError:
            self._waiting[instance_id] -= 1
            self._finish(leg_id)
            return False
        return True

    def _dispatch(self, request_id: str, instance_id: str) -> None:
        outcome = self._outcomes[int(request_id)]
        outcome.instance_id, outcome.dispatched_s = instance_id, self._now_s
        self._submit(request_id, instance_id)

    def _traced(self, leg_id: str) -> TraceRequest:
        return self._trace.requests[int(request_id_of(leg_id))]

    def _decode(self, request_id: str, source: KvSource) -> None:
        """Choose the decode instance of a split request whose KV is staged; without one it ends here."""
        leg_id, outcome = decode_leg_id(request_id), self._outcomes[int(request_id)]
        chain, output_limit = self._split_chains.pop(request_id), self._output_limit(request_id)
        placed = self._searches.run(self._searches.of_decode_leg(leg_id, chain, outcome.slo_s, output_limit))
        if placed is not None:
            self._live[leg_id] = Leg.DECODE
        if placed is not None and self._submit(leg_id, placed.instance_id, source):
            outcome.decode_id = placed.instance_id
            self._transfers.began(request_id, self._now_s, placed.reply.uncached_tokens)
        else:
            self._cluster.release_staged(source, self._now_s)
            self._finish(request_id)

    def _finish(self, leg_id: str, note: str = "") -> None:
        self._live.pop(leg_id, None)
        self._features.pop(leg_id, None)
        self._split_chains.pop(leg_id, None)
        self._grant_from(self._pool.finish(leg_id, note))

    def _grant_from(self, queue: QueueHead | None) -> None:
        """Plan a queue that has room, by a transition's reply. The grants wait in the pool."""
        if queue is not None:
            drive_now(grant_queue(queue, self._order), self._fleet)

    def _deliver_grants(self) -> None:
        while grants := self._pool.take_grants():
            for grant in grants:
                self._deliver(grant)
        if self._searches.refuses_late:
            self._refuse(self._pool.take_deferred())

    def _deliver(self, grant: Grant) -> None:
        if grant.request_id not in self._live:
            return  # refused meanwhile
        if grant.deferred or grant.instance_id != self._outcomes[int(grant.request_id)].chosen_id:
            self._features.pop(grant.request_id, None)
        self._dispatch(grant.request_id, grant.instance_id)

    def _refuse(self, request_ids: Iterable[str]) -> None:
        """Refuse held requests, as routers do; those that are granted meanwhile, as another one left room, are not."""
        for request_id in request_ids:
            if all(grant.request_id != request_id for grant in self._pool.granted):
                self._finish(request_id)

    def _on_engine_event(self, instance_id: str, event: Event) -> None:
        match event.kind:
            case EventKind.SCHEDULED:
                self._waiting[instance_id] -= 1
            case EventKind.PREEMPTED:
                self._waiting[instance_id] += 1
            case EventKind.FIRST_TOKEN:
                self._on_first_token(instance_id, event)
            case EventKind.STAGED:
                self._decode(event.request_id, KvSource(instance_id, event.request_id))
            case EventKind.FINISHED if event.request_id not in self._split_chains:
                outcome = self._outcomes[int(request_id_of(event.request_id))]
                outcome.finish_s = event.time_s
                self._finish(event.request_id, end_note(outcome, event.tokens, self._output_limit(event.request_id)))
        self._deliver_grants()
        if self._router_queue is not None:
            self._release_parked()

    def _on_first_token(self, instance_id: str, event: Event) -> None:
        """Of a whole request, of a prefill leg, which only ends its prefill, or of a decode leg, which is the answer's
        and ends the prefill leg."""
        request_id = request_id_of(event.request_id)
        outcome = self._outcomes[int(request_id)]
        if event.request_id not in self._split_chains:
            outcome.first_token_s = event.time_s
        if event.request_id != request_id:
            self._finish(request_id, self._transfers.note(request_id, event.time_s))
            return
        outcome.cached_tokens = event.tokens
        note = first_token_note(self._features.pop(request_id, None))
        self._grant_from(self._pool.first_token(request_id, instance_id, note))

    # watching ----------------------------------------------------------------------------------------------------
    def _sweep(self) -> None:
        """Refuse what was held too long, then the leader's rounds over the queues."""
        now_ms, max_hold_s = self._pool.now_ms(), self._scheduling.max_hold_s
        gives_up = self._order.gives_up
        self._refuse(
            held.request_id
            for held in self._pool.held()
            if gives_up(held, (now_ms - held.enqueued_ms) / 1000, max_hold_s)
        )
        self._leader.sweep()

    def _sample(self) -> None:
        arriving = self._arrived < len(self._trace.requests)
        self._watch.sample(self._now_s, self._scenario.sample_interval_s if arriving else 0.0)

    def _record(self) -> RunRecord:
        return RunRecord(
            policy=self._scheduling.policy,
            trace=self._trace.name,
            instances=self._scenario.instances,
            rate_per_s=self._trace.rate_per_s,
            outcomes=self._outcomes,
            samples=self._watch.samples,
            infinite_cached_tokens=cached_tokens_if_infinite(self._trace),
            migrations=self._watch.at_last.migrations - self._watch.at_first.migrations,
            preemptions=self._watch.at_last.preemptions - self._watch.at_first.preemptions,
            skip_requests=self._scenario.skip_requests,
            labels=self._scenario.labels,
            instance_hours=self._watch.paid_s / 3600,
            changes=() if self._autoscaler is None else tuple(self._autoscaler.changes),
            role_changes=tuple(self._leader.role_changes),
            moved_tokens=self._cluster.moved_tokens,
            leaks=self._watch.leaks,
        )
