"""The leader's work in virtual time: hotness tree, triggered rebalancing and sweeps.

The rules are the scheduling core's and the transitions the ledger's, as in a worker. The waiting differs, and two
things that a worker does are left out. It evacuates instances that drain; here they serve what they hold. And it
spares the store: it ignores triggers after one that led to no move until the next sweep, and pauses after a round for
as long as that took.
"""

from __future__ import annotations

from scheduling.hotness import HotnessWindow, hotness_rule
from scheduling.rebalance import plan_rebalance, plan_sweep
from scheduling.view import is_scheduled
from simulation.event_queue import EventQueue, Priority
from simulation.scenario import Scenario
from statestore.ledger import PoolLedger, upkeep
from statestore.queues import hot_queue

REASON = "rebalance"
_READ_LIMIT = 1 << 20


class HotnessKeeper:
    """Reads the arrival log and replaces the tree when it changes."""

    def __init__(self, scenario: Scenario, ledger: PoolLedger) -> None:
        settings = scenario.scheduling
        self._ledger = ledger
        self._rule = hotness_rule(settings)
        self._window = HotnessWindow(
            int(settings.hotness_window_s * 1000), settings.hotness_window_requests, settings.max_key_blocks
        )
        self._last_entry = "0"

    def tick(self) -> None:
        ledger, window = self._ledger, self._window
        for arrival in ledger.arrivals.after(self._last_entry, _READ_LIMIT):
            window.add(arrival.at_ms, arrival.head)
            window.expire(arrival.at_ms)
            self._last_entry = arrival.entry_id
        ready = sum(is_scheduled(account.spec) for account in ledger.accounts.values())
        tree = window.grow(ledger.tree, ready, self._rule)
        if tree is not ledger.tree:
            upkeep.publish_tree(ledger, tree, {prefix: window.count(prefix) for prefix in tree.hot})


class Rebalancer:
    """One round at a time: when the routing path asks, ``min_gap_s`` apart at least, and by sweep."""

    def __init__(self, scenario: Scenario, ledger: PoolLedger, events: EventQueue) -> None:
        self._scenario = scenario
        self._ledger = ledger
        self._events = events
        self._next_round_s = 0.0
        self._armed = False

    def listen(self, now_s: float) -> None:
        """Plan a round if a reservation asked for one."""
        if len(self._ledger.wanted) and not self._armed:
            self._armed = True
            self._events.push(max(now_s, self._next_round_s), Priority.LEADER, self._round)

    def _round(self, now_s: float) -> None:
        self._armed = False
        self._next_round_s = now_s + self._scenario.rebalance_min_gap_s
        for instance_id in self._ledger.wanted.take():
            self._rebalance(instance_id, int(now_s * 1000))

    def sweep(self, now_s: float) -> None:
        now_ms = int(now_s * 1000)
        for instance_id in plan_sweep(self._ledger.loads(now_ms)):
            self._rebalance(instance_id, now_ms)

    def _rebalance(self, instance_id: str, now_ms: int) -> None:
        snapshot = self._ledger.queue(instance_id, now_ms)
        if snapshot is None or not snapshot.held:
            return
        moves = plan_rebalance(hot_queue(snapshot), self._scenario.scheduling.decode_stall_s)
        for move in moves[: self._scenario.rebalance_max_moves]:
            self._ledger.migrate(move.request_id, instance_id, move.target_id, REASON, now_ms)
