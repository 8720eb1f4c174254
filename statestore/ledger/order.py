"""The two orders of granting over an account's held requests; see ``scheduling.queue_order`` for the rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

from scheduling.chain import Chain
from scheduling.queue_order import (
    CALM_WINDOWS,
    PLANNED_REQUESTS,
    Plan,
    Waiting,
    goes_at_once,
    has_room_to_spare,
    is_calm,
    is_overdue,
    is_surplus,
    plan_on_time,
    step_rest_tokens,
    steps_behind,
)
from scheduling.settings import SchedulingSettings
from statestore.ledger.account import InstanceAccount
from statestore.ledger.live import LiveRequest, Rank, by_deadline, by_sequence


class GrantOrder(Protocol):
    """Who is granted next."""

    @property
    def rank(self) -> Rank:
        """How an account sorts its queue."""

    def takes_at_once(self, account: InstanceAccount, uncached_tokens: int, deadline_ms: int, now_ms: int) -> bool:
        """Whether one more request would be dispatched without a wait, so that no limit of the queue concerns it."""

    def is_late(self, account: InstanceAccount, request: LiveRequest, now_ms: int) -> bool:
        """Whether a request that is to be held on the instance steps behind right away."""

    def is_surplus(self, account: InstanceAccount, now_ms: int) -> bool:
        """Whether a request that steps behind now is one too many."""

    def dispatch_next(self, account: InstanceAccount, now_ms: int, *, sweep: bool = False) -> Iterator[LiveRequest]:
        """Dispatch all that may go now, one by one. A ``sweep`` looks at every request, room or not."""


class FifoOrder:
    """The order of first reservation."""

    rank: Rank = staticmethod(by_sequence)

    def takes_at_once(self, account: InstanceAccount, uncached_tokens: int, deadline_ms: int, now_ms: int) -> bool:
        return _goes_at_once(account, is_behind=False)

    def is_late(self, account: InstanceAccount, request: LiveRequest, now_ms: int) -> bool:
        return False

    def is_surplus(self, account: InstanceAccount, now_ms: int) -> bool:
        return False

    def dispatch_next(self, account: InstanceAccount, now_ms: int, *, sweep: bool = False) -> Iterator[LiveRequest]:
        while len(account.queue) and account.has_room():
            request = account.queue.head()
            account.dispatch(request, now_ms)
            yield request


class DeadlineOrder:
    """The most requests on time; who steps behind waits in ``account.late`` for room to spare or ``max_hold_ms``.

    Looking at a whole queue costs in proportion to it, so that is done when there is room to give away and by the
    sweep; arrivals at a busy instance are looked at alone. Whoever is looked at is counted anew first: a request is
    only as long as what the instance was not given of it yet.
    """

    rank: Rank = staticmethod(by_deadline)

    def __init__(self, max_hold_ms: int, max_late_work_ms: int, late_work_share: float) -> None:
        self._max_hold_ms = max_hold_ms
        self._max_late_work_ms = max_late_work_ms
        self._late_work_share = late_work_share

    def takes_at_once(self, account: InstanceAccount, uncached_tokens: int, deadline_ms: int, now_ms: int) -> bool:
        if not account.has_room() and not len(account.queue):
            return self._has_calm_room(account, deadline_ms, now_ms, uncached_tokens)
        is_behind = _steps_behind(account, Waiting(deadline_ms, uncached_tokens), account.on_time_tokens, now_ms)
        # Where there is room to spare nobody is late either, see dispatch_next.
        return _goes_at_once(account, is_behind=is_behind)

    def is_late(self, account: InstanceAccount, request: LiveRequest, now_ms: int) -> bool:
        return self._is_late_behind(account, request, account.on_time_tokens, now_ms)

    def _is_late_behind(self, account: InstanceAccount, request: LiveRequest, other_tokens: int, now_ms: int) -> bool:
        behind = _steps_behind(account, _waiting(request), other_tokens, now_ms)
        return behind or is_overdue(request.enqueued_ms, now_ms, self._max_hold_ms)

    def is_surplus(self, account: InstanceAccount, now_ms: int) -> bool:
        overdue_work_ms = account.overdue.read(now_ms, self._late_work_share)
        return is_surplus(account.late_tokens, account.rate.tokens_per_s, overdue_work_ms, self._max_late_work_ms)

    def dispatch_next(self, account: InstanceAccount, now_ms: int, *, sweep: bool = False) -> Iterator[LiveRequest]:
        if len(account.queue) and (sweep or account.has_room()):
            for request in islice(account.queue, PLANNED_REQUESTS):
                account.recount(request)
            for request in self._late_in_queue(account, now_ms):
                account.step_behind(request, surplus=self.is_surplus(account, now_ms))
        if not account.serves():
            return
        while len(account.late) and is_overdue(account.late.head().enqueued_ms, now_ms, self._max_hold_ms):
            request = _dispatched(account, account.late.head(), now_ms)
            work_ms = request.uncached_tokens * 1000 / account.rate.tokens_per_s
            account.overdue = account.overdue.after(work_ms, now_ms, self._late_work_share)
            yield request
        yield from self._on_time(account, now_ms, sweep=sweep)
        while len(account.late) and account.has_room() and _has_room_to_spare(account):
            yield _dispatched(account, account.late.head(), now_ms)

    def _late_in_queue(self, account: InstanceAccount, now_ms: int) -> list[LiveRequest]:
        tokens = account.on_time_tokens
        return [
            request
            for request in account.queue
            if self._is_late_behind(account, request, tokens - request.uncached_tokens, now_ms)
        ]

    def _on_time(self, account: InstanceAccount, now_ms: int, *, sweep: bool) -> Iterator[LiveRequest]:
        if sweep or account.has_room():
            yield from self._planned(account, now_ms)
        while len(account.queue):
            head = account.queue.head()
            if not self._has_calm_room(account, head.deadline_ms, now_ms):
                break
            account.recount(head)  # whoever was to bring its prefix may have left
            if not self._has_calm_room(account, head.deadline_ms, now_ms):
                break
            yield _dispatched(account, head, now_ms)

    def _has_calm_room(
        self, account: InstanceAccount, earliest_deadline_ms: int, now_ms: int, more_tokens: int = 0
    ) -> bool:
        """Whether one more request may be dispatched because no deadline is at stake."""
        on_time_tokens = account.on_time_tokens + more_tokens
        return (
            not len(account.late)
            and account.has_room(CALM_WINDOWS)
            and is_calm(earliest_deadline_ms, now_ms, on_time_tokens, account.rate.tokens_per_s)
        )

    def _planned(self, account: InstanceAccount, now_ms: int) -> Iterator[LiveRequest]:
        requests = list(account.queue)
        plan = _plan(account, requests, now_ms)
        while requests and account.has_room():
            request = requests.pop(plan.first)
            chain = request.chain
            yield _dispatched(account, request, now_ms)
            if chain is not None:
                _recount_sharing(account, requests, chain)
            plan = _plan(account, requests, now_ms)
        account.aside_tokens = plan.aside_tokens


def grant_order(scheduling: SchedulingSettings) -> GrantOrder:
    """The order that the pool's settings name."""
    if scheduling.granting_order == "deadline":
        max_hold_ms, max_late_work_ms = round(scheduling.max_hold_s * 1000), round(scheduling.max_late_work_s * 1000)
        return DeadlineOrder(max_hold_ms, max_late_work_ms, scheduling.late_work_share)
    return FifoOrder()


def _goes_at_once(account: InstanceAccount, *, is_behind: bool) -> bool:
    return goes_at_once(
        len(account.queue),
        account.dispatched_tokens,
        account.kv_demand,
        has_room=account.has_room(),
        is_behind=is_behind,
    )


def _steps_behind(account: InstanceAccount, request: Waiting, other_tokens: int, now_ms: int) -> bool:
    step_tokens = step_rest_tokens(account.spec.dispatch_window_tokens, other_tokens)
    return steps_behind(request, now_ms, step_tokens, account.rate.tokens_per_s)


def _has_room_to_spare(account: InstanceAccount) -> bool:
    return has_room_to_spare(account.dispatched_tokens, account.kv_demand)


def _plan(account: InstanceAccount, requests: list[LiveRequest], now_ms: int) -> Plan:
    """For held requests in order of deadline."""
    waiting = [_waiting(request) for request in requests[:PLANNED_REQUESTS]]
    step_tokens = step_rest_tokens(account.spec.dispatch_window_tokens, account.on_time_tokens)
    return plan_on_time(waiting, now_ms, account.dispatched_tokens + step_tokens, account.rate.tokens_per_s)


def _recount_sharing(account: InstanceAccount, requests: list[LiveRequest], given: Chain) -> None:
    """Those whose prefix a request that was just dispatched has brought have less to compute now."""
    for request in requests[:PLANNED_REQUESTS]:
        if request.chain is not None and request.chain.hashes[0] == given.hashes[0]:
            account.recount(request)


def _waiting(request: LiveRequest) -> Waiting:
    return Waiting(request.deadline_ms, request.uncached_tokens)


def _dispatched(account: InstanceAccount, request: LiveRequest, now_ms: int) -> LiveRequest:
    account.dispatch(request, now_ms)
    return request
