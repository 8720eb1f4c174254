"""The state machine of one pool: members, and the life of their requests.

No I/O, no clock: every method takes the store's time. Methods return what the contract in ``statestore.base``
says; grants to others collect in an outbox that the caller drains after each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from scheduling.chain import Chain
from scheduling.decision import Decision, Horizon
from scheduling.hotness import HotnessTree
from scheduling.idle_holder import idle_holder, idle_holder_cost
from scheduling.instance import InstanceLoad, InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.base import (
    FinishFacts,
    Grant,
    Membership,
    MigrateStatus,
    Observation,
    QueueSnapshot,
    RequestRecord,
    RequestState,
)
from statestore.ledger.account import InstanceAccount
from statestore.ledger.arrivals import ArrivalLog, RebalanceWishes
from statestore.ledger.horizon import LightestInstances, PrefixHolders
from statestore.ledger.leadership import Leadership
from statestore.ledger.live import LiveRequest
from statestore.ledger.order import grant_order
from statestore.ledger.replicas import ReplicaLeases
from statestore.ledger.text_ratio import TextRatio
from statestore.reservation import IdlePlacement, Newcomer, Reservation, ReserveOutcome, ReserveStatus

_DISPATCHED = ReserveOutcome(ReserveStatus.DISPATCHED)
_EMPTY_CACHE = frozenset({InstanceState.DOWN, InstanceState.STARTING})
"""States at whose beginning an instance is believed to hold no KV blocks."""


class PoolLedger:
    """One pool's whole state. Not thread-safe; every method runs to its end without giving control away."""

    def __init__(self, scheduling: SchedulingSettings) -> None:
        self.epoch = 0
        self.tree_version = 0
        self.tree = HotnessTree()
        self.tree_counts: Mapping[int, int] = {}
        self.accounts: dict[str, InstanceAccount] = {}
        self.requests: dict[str, LiveRequest] = {}
        self.migrations: dict[str, int] = {}
        self.leadership = Leadership()
        self.replicas = ReplicaLeases()
        self.arrivals = ArrivalLog(scheduling.hotness_window_requests, scheduling.max_key_blocks)
        self.wanted = RebalanceWishes()
        self.text_ratio = TextRatio(scheduling.bytes_per_token)
        self.order = grant_order(scheduling)
        self.lightest = LightestInstances(scheduling.kv_weight_s)
        self.holders = PrefixHolders(scheduling.holder_marks)
        self._remembers_holders = scheduling.looks_beyond
        self._idle_holder_cost = idle_holder_cost(scheduling)
        self.last_request_sequence = 0
        self._observations = 0
        self._outbox: list[tuple[str, Grant]] = []

    def take_grants(self) -> Sequence[tuple[str, Grant]]:
        """(replica id, grant) since the last call, in order."""
        if not self._outbox:
            return ()
        taken, self._outbox = self._outbox, []
        return taken

    # members ---------------------------------------------------------------------------------------------
    def membership(self) -> Membership:
        specs = {instance_id: account.spec for instance_id, account in sorted(self.accounts.items())}
        return Membership(self.epoch, self.tree_version, specs, self.tree, self.text_ratio.bytes_per_token)

    def put_instance(self, spec: InstanceSpec, now_ms: int) -> None:
        account = self.accounts.get(spec.instance_id)
        if account is None:
            account = self.accounts[spec.instance_id] = InstanceAccount(spec, self.order.rank)
            self.lightest.put(account)
            self.epoch += 1
            return
        self._describe(account, replace(spec, state=account.spec.state), now_ms)

    def update_instance(self, instance_id: str, changes: Mapping[str, Any], now_ms: int) -> bool:
        account = self.accounts.get(instance_id)
        if account is None:
            return False
        self._describe(account, replace(account.spec, **changes), now_ms)
        return True

    def _describe(self, account: InstanceAccount, spec: InstanceSpec, now_ms: int) -> None:
        if spec != account.spec:
            account.spec = spec
            self.epoch += 1
            self.grant_next(account, now_ms)

    def set_instance_state(
        self, instance_id: str, state: InstanceState, now_ms: int, *, expected: InstanceState | None = None
    ) -> bool:
        account = self.accounts.get(instance_id)
        if account is None or (expected is not None and account.spec.state is not expected):
            return False
        if account.spec.state is state:
            return True
        account.spec = replace(account.spec, state=state)
        self.epoch += 1
        if state in _EMPTY_CACHE:
            account.kv.clear()
        if account.pending_tokens > 0:
            account.work_since_ms = now_ms
        self.grant_next(account, now_ms)
        return True

    def remove_instance(self, instance_id: str) -> bool:
        account = self.accounts.get(instance_id)
        if account is None or account.held_requests or account.running:
            return False
        del self.accounts[instance_id]
        self.lightest.discard(instance_id)
        self.wanted.discard(instance_id)
        self.epoch += 1
        return True

    # the life of a request -------------------------------------------------------------------------------
    def observe(self, instance_ids: Iterable[str], chain: Chain, now_ms: int, *, horizon: bool = False) -> Observation:
        self._observations += 1
        loads: dict[str, InstanceLoad] = {}
        for instance_id in instance_ids:
            account = self.accounts.get(instance_id)
            if account is not None:
                loads[instance_id] = account.load(now_ms, account.kv.hit_blocks(chain.hashes))
        beyond = self._horizon(chain) if horizon else None
        return Observation(self.epoch, self.tree_version, self._observations, loads, beyond)

    def _horizon(self, chain: Chain) -> Horizon:
        holders, holder_blocks = self.holders.find(chain, self.lightest)
        return Horizon(holders, holder_blocks, self.lightest.first())

    def reserve_idle(
        self, instance_ids: Iterable[str], newcomer: Newcomer, now_ms: int
    ) -> tuple[Observation, IdlePlacement | None]:
        seen = self.observe(instance_ids, newcomer.chain, now_ms, horizon=True)
        decision = self._idle_holder(newcomer, seen)
        if decision is None or newcomer.request_id in self.requests:
            return seen, None
        reservation = newcomer.reservation(decision)
        if not self._goes_unlisted(self.accounts[decision.instance_id], reservation, now_ms):
            return seen, None
        outcome = self.reserve(reservation, now_ms)
        assert outcome.status is ReserveStatus.DISPATCHED
        return seen, IdlePlacement(decision, reservation)

    def _idle_holder(self, newcomer: Newcomer, seen: Observation) -> Decision | None:
        if self._idle_holder_cost is None:
            raise ValueError("the pool's policy weighs every placement: observe, and reserve")
        assert seen.horizon is not None
        slo_s = newcomer.slo_ms / 1000
        return idle_holder(self._idle_holder_cost, newcomer.chain, slo_s, seen.loads, seen.horizon.holder_blocks)

    def _goes_unlisted(self, account: InstanceAccount, reservation: Reservation, now_ms: int) -> bool:
        """Whether a request may go now where nobody else waits, by what was promised and by what was given."""
        if not account.takes_requests() or not account.has_room():
            return False
        request = LiveRequest(reservation, now_ms, 0)
        if self.order.is_late(account, request, now_ms):
            return False
        request.uncached_tokens = account.uncached_tokens_now(request, reservation.chain)
        return not self.order.is_late(account, request, now_ms)

    def reserve(self, reservation: Reservation, now_ms: int) -> ReserveOutcome:
        former = self.requests.get(reservation.request_id)
        if former is not None and former.replica_id != reservation.replica_id:
            return ReserveOutcome(ReserveStatus.DUPLICATE)
        if former is not None and former.attempt >= reservation.attempt:
            return self._standing(former)
        account = self.accounts.get(reservation.instance_id)
        if account is None or not account.takes_requests():
            return ReserveOutcome(ReserveStatus.NOT_READY)
        if _is_stale(reservation, account, former):
            return ReserveOutcome(ReserveStatus.STALE)
        # A retry is let in even if the queue is full: its request was admitted before.
        if former is None and self._is_full(account, reservation.uncached_tokens, now_ms + reservation.slo_ms, now_ms):
            return ReserveOutcome(ReserveStatus.QUEUE_FULL)
        if former is None:
            self.last_request_sequence += 1
            request = LiveRequest(reservation, now_ms, self.last_request_sequence)
            self.arrivals.add(now_ms, reservation.chain.hashes)
        else:
            request = LiveRequest(reservation, former.enqueued_ms, former.sequence)
            request.ttft_features = None
            self._release(former)
            if former.instance_id != reservation.instance_id:
                self.grant_next(self.accounts[former.instance_id], now_ms)
        self.requests[request.request_id] = request
        self.enter(account, request, now_ms)
        account.window = account.window.add(now_ms, request.uncached_tokens)
        account.promise(reservation.chain)
        self._remember_holder(account, reservation.chain)
        self.replicas.meet(reservation.replica_id, now_ms)
        if reservation.overloaded:
            self.wanted.add(reservation.instance_id, now_ms)
        self.grant_next(account, now_ms, caller=request)
        return self._standing(request)

    def first_token(self, request_id: str, instance_id: str, chain: Chain, now_ms: int, *, seen: bool = True) -> bool:
        request = self.requests.get(request_id)
        if request is None or request.instance_id != instance_id or request.state is not RequestState.DISPATCHED:
            return False
        account = self.accounts[instance_id]
        account.prefilled(request, now_ms, seen=seen)
        if request.kv_instance_id != instance_id:
            account.give(chain)
            self._remember_holder(account, chain)
            request.kv_instance_id = instance_id
        self.grant_next(account, now_ms)
        return True

    def finish(
        self,
        request_id: str,
        now_ms: int,
        *,
        replica_id: str | None = None,
        attempt: int | None = None,
        facts: FinishFacts | None = None,
    ) -> bool:
        request = self.requests.get(request_id)
        if request is None or replica_id not in (None, request.replica_id):
            return False
        if attempt is not None and request.attempt > attempt:
            return False
        self._release(request)
        if facts is not None and facts.prompt_bytes and facts.prompt_tokens:
            self.epoch += self.text_ratio.learn(facts.prompt_bytes, facts.prompt_tokens)
        self.grant_next(self.accounts[request.instance_id], now_ms)
        return True

    def records(self, request_ids: Iterable[str]) -> dict[str, RequestRecord]:
        known = self.requests
        return {request_id: known[request_id].record() for request_id in request_ids if request_id in known}

    # moves -----------------------------------------------------------------------------------------------
    def loads(self, now_ms: int) -> dict[str, InstanceLoad]:
        return {instance_id: account.load(now_ms) for instance_id, account in sorted(self.accounts.items())}

    def queue(self, instance_id: str, now_ms: int) -> QueueSnapshot | None:
        account = self.accounts.get(instance_id)
        if account is None:
            return None
        held = tuple(request.record() for request in (*account.queue, *account.late))
        others = sorted({record.alternative_id for record in held if record.alternative_id is not None})
        alternatives = {other: self.accounts[other].load(now_ms) for other in others if other in self.accounts}
        return QueueSnapshot(now_ms, account.load(now_ms), held, alternatives)

    def migrate(self, request_id: str, source_id: str, target_id: str, reason: str, now_ms: int) -> MigrateStatus:
        request = self.requests.get(request_id)
        if request is None or request.state is not RequestState.HELD or request.instance_id != source_id:
            return MigrateStatus.NOT_HELD
        target = self.accounts.get(target_id)
        if target is None or not target.takes_requests() or target_id == source_id:
            return MigrateStatus.NOT_READY
        there = request.alternative_uncached_tokens if target_id == request.alternative_id else request.prompt_tokens
        if self._is_full(target, there, request.deadline_ms, now_ms):
            return MigrateStatus.QUEUE_FULL
        source = self.accounts[source_id]
        source.leave(request)
        self.lightest.put(source)
        request.alternative_id = source_id
        request.alternative_uncached_tokens = request.uncached_tokens
        request.instance_id = target_id
        request.ttft_features = None
        request.uncached_tokens = there
        self.enter(target, request, now_ms)
        target.window = target.window.add(now_ms, there)
        self.migrations[reason] = self.migrations.get(reason, 0) + 1
        self.grant_next(target, now_ms)
        return MigrateStatus.MIGRATED

    # inner steps, shared with upkeep -----------------------------------------------------------------------
    def enter(self, account: InstanceAccount, request: LiveRequest, now_ms: int) -> None:
        """Count a request on an instance, among the late ones if it is held and cannot be on time there."""
        request.late = request.state is RequestState.HELD and self.order.is_late(account, request, now_ms)
        request.surplus = request.late and self.order.is_surplus(account, now_ms)
        account.enter(request, now_ms)

    def grant_next(
        self, account: InstanceAccount, now_ms: int, *, caller: LiveRequest | None = None, sweep: bool = False
    ) -> int:
        """Dispatch held requests as the order says and rank the account anew: the end of every change of it.

        The ``caller``'s own request needs no message. Returns how many were dispatched.
        """
        granted = 0
        for request in self.order.dispatch_next(account, now_ms, sweep=sweep):
            granted += 1
            if request is not caller:
                grant = Grant(request.request_id, request.instance_id, request.attempt, request.uncached_tokens)
                self._outbox.append((request.replica_id, grant))
        self.lightest.put(account)
        return granted

    def _is_full(self, account: InstanceAccount, uncached_tokens: int, deadline_ms: int, now_ms: int) -> bool:
        """Whether one more request would have to be held, and the queue has no place for it."""
        if account.held_requests < account.spec.max_queued_requests:
            return False
        return not self.order.takes_at_once(account, uncached_tokens, deadline_ms, now_ms)

    def _remember_holder(self, account: InstanceAccount, chain: Chain) -> None:
        if self._remembers_holders:
            self.holders.stamp(chain, account.spec.instance_id)

    def _release(self, request: LiveRequest) -> None:
        self.accounts[request.instance_id].leave(request)
        del self.requests[request.request_id]

    def _standing(self, request: LiveRequest) -> ReserveOutcome:
        if request.state is not RequestState.HELD:
            return _DISPATCHED
        return ReserveOutcome(ReserveStatus.HELD, self.accounts[request.instance_id].position(request))


def _is_stale(reservation: Reservation, account: InstanceAccount, former: LiveRequest | None) -> bool:
    """Whether the load moved away from what the decision saw; the request's own former attempt does not count."""
    if reservation.seen_pending_tokens is None:
        return False
    pending = account.pending_tokens
    if former is not None and former.instance_id == reservation.instance_id:
        pending -= former.uncached_tokens if former.state is not RequestState.PREFILLED else 0
    return pending > reservation.seen_pending_tokens + reservation.tolerance_tokens
