"""One run in virtual time: a trace through the scheduling code, the pool's store and N engine models.

What decides here is what decides in production: the search for an instance, the queue plans and the leader's rounds of
``scheduling``, over the scripts and books of the store, within this process. Everything between them is left out: the
network and the routers' own time are zero, and decisions see the state as it is.

The same trace, scenario and code give the same result to the last digit.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from dualmap.runtime.collector import collected_seldom
from dualmap.scheduling.batches.slack import ExpectedLine, room_of, taken_by, worn_off
from dualmap.scheduling.estimates.adapters import load_share
from dualmap.scheduling.estimates.answer_length import expected_answer_tokens
from dualmap.scheduling.estimates.kv_tiers import InstanceTiers
from dualmap.scheduling.placing.placement import Claim
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.prompts.blocks import cache_seed, chain_of_trace
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.machine import (
    ON_AN_INSTANCE,
    Arrived,
    Ended,
    Failed,
    FirstToken,
    Phase,
    PrefillEnded,
    RequestMachine,
    RequestSpec,
    Sent,
)
from dualmap.scheduling.request.outcome import ANSWERED, FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.runs.turn import UNNAMED, hashed_name
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.state.legs import Leg, decode_leg_id, request_id_of
from dualmap.scheduling.tenants.classes import rank_of_name
from dualmap.scheduling.tenants.shares import NO_TENANT_WEIGHT
from dualmap.simulation.engine.engine import Engine
from dualmap.simulation.engine.engine_types import EngineConfig, EngineRequest, Event, EventKind, RequestRefusedError
from dualmap.simulation.figures.results import RequestOutcome, RunRecord, RunResult, arrival_rate_per_s, summarize
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.autoscaler import INTERVAL_S as SCALING_INTERVAL_S
from dualmap.simulation.virtual_time.autoscaler import SimulatedAutoscaler
from dualmap.simulation.virtual_time.cluster import Cluster, KvSource
from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority
from dualmap.simulation.virtual_time.program_pauses import INTERVAL_S as PAUSING_INTERVAL_S
from dualmap.simulation.virtual_time.program_pauses import ProgramPauses
from dualmap.simulation.virtual_time.router_queue import Pressure, RouterQueue
from dualmap.simulation.virtual_time.routers import Replica, Routers
from dualmap.simulation.virtual_time.scenario import EngineFault, FleetChange, Scenario
from dualmap.simulation.virtual_time.simulated_replica import SimulatedReplica
from dualmap.simulation.virtual_time.watch import Watch
from dualmap.simulation.workload.arrivals import Arrivals
from dualmap.simulation.workload.trace_figures import cached_tokens_if_infinite
from dualmap.simulation.workload.trace_runs import runs_of, turns_of_runs
from dualmap.simulation.workload.traces import Trace, TraceRequest

OnProgress = Callable[[int], None]

_SEED = cache_seed("simulated")
_PROGRESS_EVERY = 100
LEARNING_INTERVAL_S = 1.0
LINES_BEGIN_EVERY_S = 0.25
"""Time between two looks at the room for lines of batches."""
SWEEP_INTERVAL_S = 1.0
"""Time between the leader's rounds over the queues, and of the refusal of what was held too long."""


def simulate(
    trace: Trace, scenario: Scenario, on_progress: OnProgress | None = None, chains: Iterable[Chain] | None = None
) -> RunResult:
    """Run the whole trace and return its figures; ``on_progress`` gets the number of requests that have arrived.

    ``chains`` are what the scheduling code sees instead of the trace's own blocks, one a request in its order (see
    ``simulation.replay.routed_chains``); the engines' caches always work by the trace's blocks.
    """
    with collected_seldom():
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
        self._chains = None if chains is None else list(chains)
        settings = scenario.in_blocks_of(trace.block_tokens)
        self._scheduling = settings.scheduling
        self._weights = {tenant.name: tenant.weight for tenant in scenario.tenants}
        self._policy = build_policy(settings.scheduling)
        self._order = queue_order_of(settings.scheduling)
        self._now_s = 0.0
        self._arrivals = Arrivals(trace, scenario.loop)
        self._next_arrival_s = inf
        """The time for which the next arrival is scheduled."""
        self._places: list[int] = []
        """The place in the trace of each request that has arrived; the others know a request by its number here."""
        self._seen_last = False
        self._skipped: int | None = None
        """The number of requests that stay out of the results; None: all so far."""
        self._dead: set[str] = set()
        """Engines that died and are not back."""
        autoscale = scenario.autoscale
        self._waiting_room = WaitingRoom.of(None if autoscale is None else autoscale.settings)
        self._events = EventQueue()
        self._settings = settings
        self._routers = (
            Routers([self._make_replica(SimulatedReplica)])
            if scenario.routers is None
            else scenario.routers(
                self._make_replica,
                lambda: {name: engine.kv_used_tokens for name, engine in self._cluster.engines.items()},
            )
        )
        self.replicas = self._routers.replicas
        self._reported = [replica.reported for replica in self.replicas if replica.reported is not None]
        self._cluster = Cluster(
            self._events,
            self._on_engine_event,
            settings.engine.transfer,
            endless_cache=scenario.endless_cache,
            reported=self._reported,
        )
        self._watch = Watch([replica.pool for replica in self.replicas], self._cluster)
        self._autoscaler: SimulatedAutoscaler | None = None
        self._engines: dict[str, EngineConfig] = {}
        """Engines by the id of their instance, once it was there."""
        rule = scenario.router_queue
        self._router_queue = None if rule is None else RouterQueue(rule, settings.engine.max_num_batched_tokens)
        self._parked: dict[int, Chain] = {}
        """Chains of the requests that no instance is searched for yet, by number."""
        self._runs = runs_of(trace)
        self._turns_left = Counter(turns_of_runs(trace, self._runs))
        """Turns that each run still has, where programs are paused."""
        self._pauses: ProgramPauses | None = None
        self._staged: dict[str, KvSource] = {}
        """KV that no decode leg has pulled yet, by the id of its request."""
        self._pairs: dict[str, tuple[str, str]] = {}
        """The prefill and the decode instance of requests whose decode leg was sent first."""
        self._outcomes: list[RequestOutcome] = []
        self._expected_line = ExpectedLine()
        self._people_seen_s: dict[str, float] = {}
        """When each instance last had a request that is no line."""
        self._taken_tokens: dict[str, float] = defaultdict(float)
        """Tokens that lines which were begun on each instance have taken, as far as these have not worn off."""

    @property
    def engines(self) -> Mapping[str, Engine]:
        """The engines by the id of their instance, as they are at the moment."""
        return self._cluster.engines

    def run(self) -> RunRecord:
        scenario = self._scenario
        self._resize(scenario.instances)
        for change in scenario.changes:
            self._schedule_change(change)
        self._cluster.schedule_speeds(scenario.speed_changes)
        if scenario.pauses_programs:
            engines = {name: engine.kv_capacity_tokens for name, engine in self._engines.items()}
            self._pauses = ProgramPauses(engines)
            self._every(PAUSING_INTERVAL_S, Priority.LEADER, self._resume_programs)
        if scenario.autoscale is not None:
            self._autoscaler = self._make_autoscaler(scenario.autoscale)
            self._every(SCALING_INTERVAL_S, Priority.LEADER, self._autoscaler.tick)
        self._schedule_arrival()
        if scenario.loop.seconds < inf:
            self._events.push(self._arrivals.first_s + scenario.loop.seconds, Priority.ARRIVAL, self._note_last)
        if self._routers.read is not None:
            self._every(self._routers.reading_interval_s, Priority.MEMBERSHIP, self._routers.read)
        for replica in self.replicas:
            self._every(scenario.hotness_interval_s, Priority.LEADER, replica.leader.grow_tree)
            self._every(LEARNING_INTERVAL_S, Priority.LEADER, replica.leader.learn)
        self._every(scenario.sample_interval_s, Priority.SAMPLE, self._sample)
        for replica in self.replicas:
            if self._policy.rebalances:
                self._every(scenario.rebalance_interval_s, Priority.LEADER, replica.rebalance_by_sweep)
            elif scenario.idle_work and self._order.by_deadline:
                self._every(scenario.rebalance_interval_s, Priority.LEADER, replica.give_idle_work)
        self._every(SWEEP_INTERVAL_S, Priority.LEADER, self._sweep)
        if self._scheduling.admit_runs:
            self._every(SWEEP_INTERVAL_S, Priority.LEADER, self._repeat_parked)
        if scenario.loop.lines:
            self._every(LINES_BEGIN_EVERY_S, Priority.LEADER, self._begin_lines)
        for fault in scenario.faults:
            self._schedule_fault(fault)
        while len(self._events):
            self._now_s, action = self._events.pop()
            action(self._now_s)
            for replica in self.replicas:
                replica.requests.admit_waiting()
                self._deliver_turns(replica)
                replica.requests.deliver_grants()
        return self._record()

    # time --------------------------------------------------------------------------------------------------------
    def _every(self, interval_s: float, priority: Priority, action: Callable[[], None], turn: int = 1) -> None:
        """Repeat while there is work; multiples of the interval, not sums, so that no error adds up."""

        def repeat(_: float) -> None:
            action()
            if any(replica.requests.live for replica in self.replicas) or self._parked or not self._arrivals.over:
                self._every(interval_s, priority, action, turn + 1)

        self._events.push(turn * interval_s, priority, repeat)

    def _schedule_arrival(self) -> None:
        """Schedule the next arrival that is known of, unless it is already."""
        due_s = self._arrivals.due_s
        if due_s is not None and due_s < self._next_arrival_s:
            self._next_arrival_s = due_s
            self._events.push(due_s, Priority.ARRIVAL, self._arrive)

    def _schedule_change(self, change: FleetChange) -> None:
        self._events.push(change.at_s, Priority.MEMBERSHIP, lambda _: self._resize(change.instances))

    def _schedule_fault(self, fault: EngineFault) -> None:
        self._events.push(fault.at_s, Priority.MEMBERSHIP, lambda _: self._kill(fault.instance_id))
        self._events.push(
            fault.at_s + fault.down_for_s, Priority.MEMBERSHIP, lambda _: self._restart(fault.instance_id)
        )

    def _make_replica(self, kind: type[Replica]) -> Replica:
        return kind(
            self._settings, self._policy, self._order, self._events,
            now_s=lambda: self._now_s,
            arrived=lambda: len(self._places),
            kv_used_tokens=self._kv_used_tokens,
            waiting_room=self._waiting_room,
            send=self._send,
            left=self._leave_engines,
            ended=self._on_ended,
            stop=self._stop,
        )  # fmt: skip

    # members -----------------------------------------------------------------------------------------------------
    def _resize(self, instances: int) -> None:
        """Make ``instances`` ready: add new ones, drain those beyond."""
        wanted = {spec.instance_id: spec for spec in map(self._describe_instance, range(instances))}
        for instance_id, spec in wanted.items():
            if instance_id not in self._cluster.engines:
                self._start_engine(spec)
        for replica in self.replicas:
            replica.resize(wanted, {name: self._tiers_of(name) for name in wanted})

    def _tiers_of(self, instance_id: str) -> InstanceTiers:
        return self._engines[instance_id].instance_tiers(instance_id if self._scenario.pulls else None)

    def _make_autoscaler(self, autoscale: Autoscale) -> SimulatedAutoscaler:
        spares = list(map(self._describe_instance, range(self._scenario.instances, autoscale.most)))
        (replica,) = self.replicas
        replica.waiting |= {spec.instance_id: 0 for spec in spares}
        return SimulatedAutoscaler(
            autoscale,
            replica.fleet,
            replica.leader,
            order=self._order,
            events=self._events,
            spares=spares,
            start_engine=self._start_engine,
            arrived=lambda: len(self._places),
            waiting=lambda: 0 if self._waiting_room is None else self._waiting_room.waiting,
        )

    def _describe_instance(self, index: int) -> InstanceSpec:
        """The instance of this number, from 0, whose engine is known from now on."""
        spec = self._scenario.spec(index)
        self._engines[spec.instance_id] = self._settings.engine_of(index)
        return spec

    def _start_engine(self, spec: InstanceSpec) -> None:
        engine = self._engines[spec.instance_id]
        self._cluster.add(spec.instance_id, replace(engine, kv_capacity_tokens=spec.kv_capacity_tokens))

    def _kill(self, instance_id: str) -> None:
        """The engine dies, with what it computed: every request that it holds fails, and those that come are refused
        until it is back. The members do not change: no worker checks the health of engines here."""
        self._dead.add(instance_id)
        self._start_engine(self.replicas[0].pool.members.instances[instance_id])
        for replica in self.replicas:
            replica.waiting[instance_id] = 0
        for machine in [machine for replica in self.replicas for machine in replica.requests.live.values()]:
            died = InstanceFailure(FailureKind.CLOSED, "the engine died")
            if machine.phase in ON_AN_INSTANCE and machine.answering_id == instance_id:
                self._fail(machine, died)
            elif machine.phase is Phase.PAIRED and machine.instance_id == instance_id:
                self._fail(machine, died, Leg.PREFILL)

    def _restart(self, instance_id: str) -> None:
        self._dead.discard(instance_id)

    # the life of a request ---------------------------------------------------------------------------------------
    def _arrive(self, now_s: float) -> None:
        self._next_arrival_s = inf
        due_s = self._arrivals.due_s
        if due_s is None or due_s > now_s:
            return self._schedule_arrival()  # this one came by an earlier event
        self._enter(self._arrivals.take())
        return self._schedule_arrival()

    def _enter(self, place: int, pinned_to: str | None = None) -> None:
        """A request arrives at its router; ``pinned_to``: a line, for this instance."""
        now_s = self._now_s
        request, number = self._trace.requests[place], len(self._places)
        self._places.append(place)
        if self._skipped is None and self._is_measured(number):
            self._skipped = number
            self._watch.at_first = self._watch.counters()
        if self._arrivals.over:
            self._note_last()
        if self._on_progress is not None and (number + 1) % _PROGRESS_EVERY == 0:
            self._on_progress(number + 1)
        chain = self._own_chain(request) if self._chains is None else self._chains[place]
        for reported in self._reported:
            reported.route(request.hash_ids, chain.hashes)
        outcome = self._new_outcome(request, chain)
        queue = self._router_queue
        if queue is not None and (queue or self._router_holds(queue)):
            self._parked[number] = chain
            return queue.park(number, now_s, request.input_tokens, outcome.slo_s, outcome.run)
        if self._pauses is not None and outcome.run:
            pinned_to = self._pauses.arrives(outcome.run, number, request.input_tokens, now_s)
            if pinned_to is None:
                self._parked[number] = chain
                return None
        self._place(str(number), request, chain, pinned_to)
        return self._listen(self._replica_of(str(number)))

    def _listen(self, replica: SimulatedReplica) -> None:
        """Have the leader hear of the instances that a placement found overloaded; only some policies report them."""
        if self._policy.rebalances:
            replica.leader.listen(self._now_s)

    def _begin_lines(self) -> None:
        """Begin lines of batches where interactive requests leave room, as a replica does, and stop those that are too
        many."""
        at_once, (replica,) = self._scenario.loop.lines_at_once, self.replicas
        if at_once is not None:
            for _ in range(at_once - self._arrivals.lines_under_way):
                self._begin_line()
            return
        lines = Counter(
            machine.instance_id for machine in replica.requests.live.values() if self._is_line(machine.request_id)
        )
        loads = replica.pool.loads()
        for place, (instance_id, load) in enumerate(sorted(loads.items())):
            if load.in_flight > lines[instance_id]:
                self._people_seen_s[instance_id] = self._now_s
            quiet_s = self._now_s - self._people_seen_s.get(instance_id, 0.0)
            taken_tokens = worn_off(self._taken_tokens[instance_id], load, LINES_BEGIN_EVERY_S)
            room = room_of(load, lines[instance_id], quiet_s, self._expected_line, taken_tokens)
            self._taken_tokens[instance_id] = taken_tokens + room.begins * taken_by(self._expected_line, load)
            replica.requests.evict_lines(instance_id, lines[instance_id] - room.most)
            for _ in range(room.begins):
                self._begin_line(instance_id, place, len(loads))

    def _begin_line(self, instance_id: str | None = None, place: int = 0, places: int = 1) -> None:
        line = self._arrivals.take_line(place, places)
        if line is not None:
            self._enter(line, instance_id)

    def _is_line(self, request_id: str) -> bool:
        traced = self._traced(request_id)
        return bool(traced.priority) and traced.priority == self._scenario.loop.lines

    def _note_last(self, _: float = 0.0) -> None:
        """Note the counters once no request will arrive any more."""
        if not self._seen_last:
            self._seen_last = True
            self._watch.at_last = self._watch.counters()

    def _is_measured(self, number: int) -> bool:
        """Whether the request that arrives now as this number is the first of the results, or a later one."""
        scenario = self._scenario
        return number >= scenario.skip_requests and self._now_s >= self._arrivals.first_s + scenario.skip_s

    def _new_outcome(self, request: TraceRequest, chain: Chain) -> RequestOutcome:
        target_s = slo_s(self._scheduling, chain.prompt_tokens, request.slo_ttft_s, self._class_rank(request))
        outcome = RequestOutcome(
            self._now_s, request.input_tokens, request.output_tokens, target_s, tenant=request.tenant,
            priority=request.priority, run=self._runs.get(request.session, ""),
        )  # fmt: skip
        self._outcomes.append(outcome)
        return outcome

    def _router_holds(self, queue: RouterQueue) -> bool:
        (replica,) = self.replicas
        loads = replica.pool.loads()
        return queue.holds(
            self._pressure(loads[instance_id], replica.waiting[instance_id]) for instance_id in replica.fleet.view.ready
        )

    def _pressure(self, load: InstanceLoad, waiting: int) -> Pressure:
        kv_use = self._kv_used_tokens(load.instance_id) / max(1, load.kv_capacity_tokens)
        return Pressure(load.pending_tokens, waiting, kv_use)

    def _kv_used_tokens(self, instance_id: str) -> int:
        return self._cluster.engines[instance_id].kv_used_tokens

    def _release_parked(self) -> None:
        """Route what the router's own queue holds, as far as instances have room again."""
        queue = self._router_queue
        while queue and not self._router_holds(queue):
            number = queue.take()
            self._place(str(number), self._traced(str(number)), self._parked.pop(number))

    def _resume_programs(self) -> None:
        """Route the turns of programs that need not wait any more."""
        assert self._pauses is not None
        for number, instance_id in self._pauses.tick(self._now_s):
            self._place(str(number), self._traced(str(number)), self._parked.pop(number), instance_id)

    def _repeat_parked(self) -> None:
        """Have turns that wait looked up, as replicas do: others may have been silent for long enough by now."""
        for replica in self.replicas:
            replica.requests.repeat_parked()

    def _deliver_turns(self, replica: SimulatedReplica) -> None:
        """Route the turns that wait no longer."""
        for machine in replica.requests.deliver_turns():
            self._note_placed(machine)
            self._listen(replica)

    def _own_chain(self, request: TraceRequest) -> Chain:
        chain = chain_of_trace(request.hash_ids, request.input_tokens, _SEED, self._trace.block_tokens)
        return replace(chain, root=cache_seed("", request.adapter)) if request.adapter else chain

    def _place(self, request_id: str, request: TraceRequest, chain: Chain, pinned_to: str | None = None) -> None:
        """Search and reserve, as a router does; a request that no instance takes is refused."""
        outcome, replica = self._outcomes[int(request_id)], self._replica_of(request_id)
        fleet = replica.fleet
        outcome.key_blocks = fleet.view.tree.key_blocks(chain)
        output_limit = self._output_limit(request_id)
        spec = RequestSpec(
            prompt_hash=chain.hashes[-1] if chain.tail_hash is None else chain.tail_hash,
            chain=chain,
            slo_s=outcome.slo_s,
            expected_output_tokens=expected_answer_tokens(fleet.learned.answer_tokens, output_limit),
            output_limit=output_limit,
            may_split=True,
            hides_first_token=not self._is_seen(int(request_id)),
            claim=Claim(
                request.tenant,
                weight=self._weights.get(request.tenant, NO_TENANT_WEIGHT) if self._weights else None,
                class_rank=self._class_rank(request),
            ),
            can_go_on=True,
            may_pull=True,
            run=hashed_name(request.tenant, outcome.run, request.session) if outcome.run else UNNAMED,
            adapter=request.adapter,
            adapter_share=load_share(request.adapter_rank),
            pinned_to=pinned_to,
        )
        machine = RequestMachine(request_id, spec, replica.rules, self._now_s)
        replica.requests.live[request_id] = machine
        replica.requests.report(machine, Arrived())
        self._note_placed(machine)

    def _note_placed(self, machine: RequestMachine) -> None:
        """Note what its first search expected; nothing while it waits for memory."""
        outcome = self._outcomes[int(machine.request_id)]
        rounds = machine.searches[0][0].rounds if machine.searches else ()
        if rounds:
            decision = rounds[-1].decision
            outcome.expected_ttft_s = decision.expected_ttft_s
            outcome.expected_cached_tokens = max(0, outcome.input_tokens - decision.uncached_tokens)
        if machine.estimate is not None:
            outcome.chosen_id = machine.estimate.decision.instance_id

    def _is_seen(self, number: int) -> bool:
        share = self._scenario.first_tokens_seen
        return int((number + 1) * share) > int(number * share)

    def _class_rank(self, request: TraceRequest) -> int:
        return rank_of_name(self._scheduling.classes, request.priority)

    def _engine_priority(self, request: TraceRequest) -> int:
        """The priority that a request has for engines, as routers send it."""
        scheduling = self._scheduling
        if not scheduling.engine_priorities or not scheduling.classes:
            return 0
        return scheduling.classes[self._class_rank(request)].engine_priority

    def _output_limit(self, leg_id: str) -> int | None:
        return self._traced(leg_id).output_tokens if self._scenario.output_limits_known else None

    def _replica_of(self, leg_id: str) -> SimulatedReplica:
        return self.replicas[int(request_id_of(leg_id)) % len(self.replicas)]

    def _traced(self, leg_id: str) -> TraceRequest:
        return self._trace.requests[self._places[int(request_id_of(leg_id))]]

    def _send(self, machine: RequestMachine) -> None:
        """Give a request, or the leg of it that is to be sent now, to its engine."""
        request_id, leg = machine.request_id, machine.to_send
        if machine.phase is Phase.PAIRED:
            self._pairs[request_id] = machine.instance_id, machine.answering_id
            source = KvSource(machine.instance_id, request_id)
            self._submit(machine, Leg.DECODE, source, ask=lambda: self._submit(machine, Leg.PREFILL))
        elif leg is Leg.DECODE:
            self._submit(machine, leg, self._staged[request_id])
        else:
            self._submit(machine, leg)

    def _submit(
        self,
        machine: RequestMachine,
        leg: Leg,
        source: KvSource | None = None,
        ask: Callable[[], None] | None = None,
    ) -> None:
        """Give a request, or a leg of it, to its engine. A decode leg has a ``source``, and calls ``ask`` once it has
        its blocks."""
        outcome = self._outcomes[int(machine.request_id)]
        if leg is Leg.DECODE:
            instance_id, leg_id = machine.answering_id, decode_leg_id(machine.request_id)
            outcome.decode_id = instance_id
        else:
            instance_id, leg_id = machine.instance_id, machine.request_id
            outcome.instance_id, outcome.dispatched_s = instance_id, self._now_s
        if instance_id in self._dead:
            return self._fail(machine, InstanceFailure(FailureKind.CONNECT, "the engine is dead"), leg)
        traced, prefills = self._traced(leg_id), leg is Leg.PREFILL
        # Equal ids mean equal prefixes already: the engine needs no hashes of them.
        full_blocks = traced.hash_ids[: traced.input_tokens // self._trace.block_tokens]
        output_tokens = 1 if prefills else max(1, traced.output_tokens - machine.sent_tokens)
        prompt_tokens = self._prompt_tokens(machine, traced)
        peer = machine.source if leg is Leg.WHOLE else None
        request = EngineRequest(
            leg_id,
            prompt_tokens,
            output_tokens,
            full_blocks,
            stages_kv=prefills,
            awaits_kv=source is not None,
            max_load_tokens=None if leg is Leg.DECODE else machine.max_load_tokens,
            pulls=peer is not None,
            adapter=traced.adapter,
            adapter_share=load_share(traced.adapter_rank),
            priority=self._engine_priority(traced),
        )
        replica = self._replica_of(machine.request_id)
        replica.waiting[instance_id] += 1
        try:
            peer_id = None if peer is None else peer.instance_id
            self._cluster.submit(instance_id, request, self._now_s, source, ask, peer_id=peer_id)
        except RequestRefusedError:
            replica.waiting[instance_id] -= 1
            return replica.requests.report(machine, Ended(Outcome.CLIENT_ERROR))
        return replica.requests.report(machine, Sent())

    def _prompt_tokens(self, machine: RequestMachine, traced: TraceRequest) -> int:
        """The prompt of a request as it is sent now: with what was generated of an answer that is continued."""
        return traced.input_tokens + machine.sent_tokens

    def _on_ended(self, machine: RequestMachine) -> None:
        """A request is over, however it went."""
        outcome = self._outcomes[int(machine.request_id)]
        outcome.tries, outcome.outcome = machine.tries, machine.outcome
        self._turn_over(outcome, self._places[int(machine.request_id)])
        if self._is_line(machine.request_id):
            self._arrivals.line_ended()
            if machine.outcome in ANSWERED:
                self._expected_line = self._expected_line.learned(
                    outcome.input_tokens + outcome.output_tokens, outcome.input_tokens - (outcome.cached_tokens or 0)
                )
        if self._arrivals.ended(self._places[int(machine.request_id)], self._now_s):
            self._schedule_arrival()

    def _turn_over(self, outcome: RequestOutcome, place: int) -> None:
        """Tell the rules of other projects, if there are such. A client that stops reports its run as ended."""
        tokens = outcome.input_tokens + outcome.output_tokens
        if self._router_queue is not None:
            self._router_queue.ended(outcome.run, tokens)
        if self._pauses is not None and outcome.run:
            self._turns_left[outcome.run] -= 1
            is_last = self._turns_left[outcome.run] == 0 or self._arrivals.is_cut_off(place, self._now_s)
            self._pauses.ended(outcome.run, tokens, is_last=is_last)

    def _leave_engines(self, machine: RequestMachine) -> None:
        """A request is no longer on its instances: abort a leg that is still there, and free what is staged for it and
        was not pulled."""
        if machine.request_id in self._pairs:
            prefills_id, decodes_id = self._pairs.pop(machine.request_id)
            self._abort(prefills_id, machine.request_id)
            self._abort(decodes_id, decode_leg_id(machine.request_id))
        source = self._staged.pop(machine.request_id, None)
        if source is not None and source.instance_id not in self._dead:
            self._cluster.release_staged(source, self._now_s)

    def _stop(self, machine: RequestMachine) -> int:
        """Take a whole request from its engine; returns the tokens of its answer so far."""
        engine = self._cluster.engines[machine.instance_id]
        tokens = machine.sent_tokens + engine.generated_tokens(machine.request_id)
        self._abort(machine.instance_id, machine.request_id)
        return tokens

    def _abort(self, instance_id: str, leg_id: str) -> None:
        waited = self._cluster.engines[instance_id].statistics().waiting
        self._cluster.abort(instance_id, leg_id, self._now_s)
        self._replica_of(leg_id).waiting[instance_id] -= (
            waited - self._cluster.engines[instance_id].statistics().waiting
        )

    def _fail(self, machine: RequestMachine, failure: InstanceFailure, leg: Leg | None = None) -> None:
        """An engine failed a request, or this leg, perhaps when its client had a part of the answer."""
        requests = self._replica_of(machine.request_id).requests
        if machine.phase is Phase.ANSWERING:
            requests.report(machine, Failed(failure, begun=True))
            requests.report(machine, Ended(Outcome.UPSTREAM_FAILED))
        else:
            staged = self._staged.get(machine.request_id)
            keeps_kv = staged is not None and staged.instance_id not in self._dead and not self._scenario.decode_first
            failed_leg = Leg.PREFILL if leg is Leg.PREFILL else None
            requests.report(machine, Failed(failure, leg=failed_leg, keeps_kv=keeps_kv))

    def _on_engine_event(self, instance_id: str, event: Event) -> None:
        replica = self._replica_of(event.request_id)
        match event.kind:
            case EventKind.SCHEDULED:
                replica.waiting[instance_id] -= 1
            case EventKind.PREEMPTED:
                replica.waiting[instance_id] += 1
            case EventKind.FIRST_TOKEN:
                self._on_first_token(event)
            case EventKind.STAGED:
                self._on_staged(instance_id, event.request_id)
            case EventKind.FINISHED:
                self._on_finished(event)
        replica.requests.deliver_grants()
        if self._router_queue is not None:
            self._release_parked()

    def _on_first_token(self, event: Event) -> None:
        """The first token of a whole request, of a prefill leg, which only ends its prefill, or of a decode leg, which
        is that of the answer."""
        request_id = request_id_of(event.request_id)
        outcome, requests = self._outcomes[int(request_id)], self._replica_of(request_id).requests
        machine = requests.live[request_id]
        if event.request_id == request_id:
            self._count_work(outcome, machine, event.tokens)
        if machine.leg is Leg.PREFILL and event.request_id == request_id:
            return
        if not machine.sent_tokens:
            outcome.first_token_s = event.time_s
        self._staged.pop(request_id, None)
        if not machine.spec.hides_first_token:
            requests.report(machine, FirstToken())

    def _count_work(self, outcome: RequestOutcome, machine: RequestMachine, cached_tokens: int) -> None:
        if not machine.sent_tokens:
            outcome.cached_tokens = cached_tokens
        if outcome.tenant and machine.target is not None:
            prefilled = outcome.input_tokens + machine.sent_tokens - cached_tokens
            before_s = outcome.prefill_work_s if machine.sent_tokens else 0.0
            outcome.prefill_work_s = before_s + prefilled / machine.target.prefill_tokens_per_s
            context_tokens = outcome.input_tokens + outcome.output_tokens
            outcome.kv_share = context_tokens / machine.target.kv_capacity_tokens

    def _on_staged(self, instance_id: str, request_id: str) -> None:
        self._staged[request_id] = KvSource(instance_id, request_id)
        requests = self._replica_of(request_id).requests
        requests.report(requests.live[request_id], PrefillEnded())

    def _on_finished(self, event: Event) -> None:
        request_id = request_id_of(event.request_id)
        requests = self._replica_of(request_id).requests
        machine = requests.live.get(request_id)
        if machine is None or (machine.leg is Leg.PREFILL and event.request_id == request_id):
            return
        self._outcomes[int(request_id)].finish_s = event.time_s
        if machine.spec.hides_first_token:
            requests.report(machine, Ended(Outcome.ENDED))
        else:
            usage = Usage(output_tokens=event.tokens + machine.sent_tokens)
            requests.report(machine, Ended(Outcome.COMPLETED, usage))

    # watching ----------------------------------------------------------------------------------------------------
    def _sweep(self) -> None:
        """Refuse what was held too long, then the leader's rounds over the queues."""
        for replica in self.replicas:
            replica.requests.turn_away(replica.pool.held())
            replica.leader.sweep()

    def _sample(self) -> None:
        arriving = not self._arrivals.over
        self._watch.sample(self._now_s, self._scenario.sample_interval_s if arriving else 0.0)

    def _record(self) -> RunRecord:
        arrived = replace(self._trace, requests=tuple(self._trace.requests[place] for place in self._places))
        closed = self._scenario.loop.is_closed(self._trace)
        return RunRecord(
            policy=self._scheduling.policy,
            trace=self._trace.name,
            instances=self._scenario.instances,
            rate_per_s=arrival_rate_per_s(self._outcomes) if closed else self._trace.rate_per_s,
            outcomes=self._outcomes,
            samples=self._watch.samples,
            infinite_cached_tokens=cached_tokens_if_infinite(arrived),
            migrations=self._watch.at_last.migrations - self._watch.at_first.migrations,
            preemptions=self._watch.at_last.preemptions - self._watch.at_first.preemptions,
            adapter_loads=self._watch.at_last.adapter_loads - self._watch.at_first.adapter_loads,
            adapter_disk_loads=self._watch.at_last.adapter_disk_loads - self._watch.at_first.adapter_disk_loads,
            skip_requests=len(self._places) if self._skipped is None else self._skipped,
            instance_hours=self._watch.paid_s / 3600,
            changes=() if self._autoscaler is None else tuple(self._autoscaler.changes),
            role_changes=tuple(change for replica in self.replicas for change in replica.leader.role_changes),
            moved_tokens=self._cluster.moved_tokens,
            leaks=self._watch.leaks,
            slo_tpot_s=self._scenario.slo_tpot_s,
            turns_of_runs=turns_of_runs(self._trace, self._runs),
        )
