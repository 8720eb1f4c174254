"""The queue order of the paper's authors."""

from __future__ import annotations

from paper_regime import longest_hit_first

from dualmap.scheduling.queues.granting import Commit, grant_queue
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead, QueueOrder
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState

FIFO = QueueOrder(by_deadline=False, max_deferred_s=30.0)
PROMPTS = [200, 2000, 2000]
QUEUE = (QueueEntry("0", 1, 100), QueueEntry("1", 2, 900), QueueEntry("2", 3, 900))
"""The second has the longest hit; the third as long a one, and it came later."""


def granted(dispatched_tokens: int) -> list[str]:
    load = InstanceLoad(
        "a", InstanceState.READY, prefill_tokens_per_s=1000.0, dispatched_tokens=dispatched_tokens,
        dispatch_window_tokens=1, kv_capacity_tokens=10_000, max_running_requests=8,
    )  # fmt: skip
    commit = next(grant_queue(QueueHead(0, load, QUEUE), FIFO), None)
    return [step.request_id for step in commit.plan.steps] if isinstance(commit, Commit) else []


def test_the_longest_hit_goes_first_and_one_at_a_time() -> None:
    with longest_hit_first(PROMPTS):
        assert granted(dispatched_tokens=0) == ["1"]
        assert granted(dispatched_tokens=1) == []


def test_the_products_own_order_is_back_afterwards() -> None:
    with longest_hit_first(PROMPTS):
        pass

    assert granted(dispatched_tokens=0) == ["0"]
