"""Plans and commits, driven by hand against a queue of this file's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dualmap.scheduling.queues.granting import MAX_PLANS, CommitReply, Grant, grant_queue
from dualmap.scheduling.queues.queue_order import QueueEntry, QueueHead, QueueOrder, QueuePlan
from dualmap.scheduling.state.instance import InstanceLoad
from dualmap.scheduling.steps import drive_now

Load = Callable[..., InstanceLoad]
FIFO = QueueOrder(by_deadline=False, max_deferred_s=30.0)
DEADLINE = QueueOrder(by_deadline=True, max_deferred_s=0.0)


@dataclass
class Queues:
    """Answers commits with the replies it was given, in order."""

    replies: list[CommitReply]
    plans: list[QueuePlan] = field(default_factory=list)

    async def commit(self, plan: QueuePlan) -> CommitReply:
        self.plans.append(plan)
        return self.replies[len(self.plans) - 1]


def head(load: InstanceLoad, *names: str) -> QueueHead:
    return QueueHead(1000, load, tuple(QueueEntry(name, 500, 10) for name in names))


def grant(name: str, uncached_tokens: int = 10) -> Grant:
    return Grant(name, "a", "replica", 1, uncached_tokens)


def names(plan: QueuePlan) -> list[str]:
    return [step.request_id for step in plan.steps]


def test_one_plan_empties_a_queue_that_fits(load: Load) -> None:
    fleet = Queues([CommitReply((grant("r1"), grant("r2")))])

    assert drive_now(grant_queue(head(load("a", version=3), "r1", "r2"), FIFO), fleet) == 2
    assert [(plan.instance_id, plan.version, names(plan)) for plan in fleet.plans] == [("a", 3, ["r1", "r2"])]


def test_no_queue_costs_no_step() -> None:
    assert drive_now(grant_queue(None, FIFO), Queues([])) == 0


def test_a_queue_without_room_costs_no_step(load: Load) -> None:
    assert drive_now(grant_queue(head(load("a", dispatched_tokens=4096), "r1"), FIFO), Queues([])) == 0


def test_a_stale_plan_is_made_again_for_the_queue_as_it_is(load: Load) -> None:
    # given another replica that dispatched the first one meanwhile
    fleet = Queues([CommitReply(queue=head(load("a", version=4), "r2")), CommitReply((grant("r2"),))])

    assert drive_now(grant_queue(head(load("a", version=3), "r1", "r2"), FIFO), fleet) == 1
    assert [(plan.version, names(plan)) for plan in fleet.plans] == [(3, ["r1", "r2"]), (4, ["r2"])]


def test_a_queue_with_more_room_is_planned_on(load: Load) -> None:
    fleet = Queues([CommitReply((grant("r1"),), head(load("a"), "r2")), CommitReply((grant("r2"),))])

    assert drive_now(grant_queue(head(load("a"), "r1"), FIFO), fleet) == 2


def test_a_granting_that_others_keep_making_stale_ends(load: Load) -> None:
    queue = head(load("a"), "r1")
    fleet = Queues([CommitReply(queue=queue)] * (MAX_PLANS + 1))

    assert drive_now(grant_queue(queue, FIFO), fleet) == 0
    assert len(fleet.plans) == MAX_PLANS
