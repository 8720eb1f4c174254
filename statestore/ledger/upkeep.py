"""What keeps a ledger right when processes die and stores vanish: adoption, reaping, repair; and the view of it all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduling.hotness import HotnessTree
from statestore.base import PoolSnapshot, RequestRecord
from statestore.ledger.live import LiveRequest
from statestore.ledger.pool import PoolLedger
from statestore.reaping import latest_first


def adopt(ledger: PoolLedger, records: Sequence[RequestRecord], now_ms: int) -> int:
    """Enter live requests as they are; those known, or on an unknown instance, are left. Returns how many."""
    adopted = 0
    for record in records:
        account = ledger.accounts.get(record.instance_id)
        if account is None or record.request_id in ledger.requests:
            continue
        request = LiveRequest.adopted(record)
        ledger.requests[request.request_id] = request
        ledger.last_request_sequence = max(ledger.last_request_sequence, request.sequence)
        ledger.replicas.meet(request.replica_id, now_ms)
        ledger.enter(account, request, now_ms)
        ledger.grant_next(account, now_ms)
        adopted += 1
    return adopted


def reap(ledger: PoolLedger, replica_id: str, now_ms: int) -> int:
    """Finish every request of a replica without a running lease and forget it; returns how many."""
    if ledger.replicas.alive(replica_id, now_ms):
        return 0
    left = latest_first(request for request in ledger.requests.values() if request.replica_id == replica_id)
    for request in left:
        ledger.finish(request.request_id, now_ms)
    ledger.replicas.forget(replica_id)
    return len(left)


def repair(ledger: PoolLedger, now_ms: int) -> int:
    """Recompute every instance's sums from its requests; returns how many instances were off."""
    repaired = 0
    for account in ledger.accounts.values():
        account.set_clock_back(now_ms)
        sums = account.sums()
        if sums != (account.pending_tokens, account.dispatched_tokens, account.late_tokens, account.context_tokens):
            account.pending_tokens, account.dispatched_tokens, account.late_tokens, account.context_tokens = sums
            repaired += 1
        ledger.grant_next(account, now_ms)
    return repaired


def grant_overdue(ledger: PoolLedger, now_ms: int) -> int:
    """Grant on every instance that holds requests; returns how many were dispatched."""
    holding = [account for account in ledger.accounts.values() if account.held_requests]
    return sum(ledger.grant_next(account, now_ms, sweep=True) for account in holding)


def publish_tree(ledger: PoolLedger, tree: HotnessTree, counts: Mapping[int, int]) -> int:
    """Replace the tree and its counters; the version grows only when the tree itself changed."""
    if tree.hot != ledger.tree.hot:
        ledger.tree_version += 1
    ledger.tree = HotnessTree(dict(tree.hot))
    ledger.tree_counts = dict(counts)
    return ledger.tree_version


def snapshot(ledger: PoolLedger, now_ms: int) -> PoolSnapshot:
    """Everything, requests in order of their first reservation."""
    requests = sorted(ledger.requests.values(), key=lambda request: (request.sequence, request.request_id))
    return PoolSnapshot(
        now_ms,
        ledger.epoch,
        ledger.tree_version,
        ledger.membership().instances,
        ledger.loads(now_ms),
        tuple(request.record() for request in requests),
        ledger.replicas.all(),
        ledger.leadership.current(now_ms),
        dict(ledger.migrations),
    )
