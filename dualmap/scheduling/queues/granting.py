"""Granting: plan the queue of an instance and commit the plan, until there is no room or nothing to grant."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import KW_ONLY
from typing import Protocol

from dualmap.scheduling.queues.queue_order import QueueHead, QueueOrder, QueuePlan, plan_queue
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.steps import Step, Steps
from dualmap.scheduling.values import value

MAX_PLANS = 16
"""Plans of one granting: the rest is granted with the next transition, or by the leader's sweep."""


@value
class Grant:
    """The message to its replica that a held request was dispatched."""

    request_id: str
    instance_id: str
    replica_id: str
    attempt: int
    uncached_tokens: int
    """Prompt tokens to prefill there, as counted when the request was dispatched."""
    _: KW_ONLY
    deferred: bool = False
    """Whether it had been deferred: its TTFT says little about its instance."""
    running_requests: int = 0
    """Running requests on its instance, without this one."""
    context_tokens: int = 0
    """Context tokens of the running requests."""

    @classmethod
    def of(cls, request: StoredRequest) -> Grant:
        """The grant of a dispatched request."""
        return cls(
            request.request_id, request.instance_id, request.replica_id, request.attempt, request.uncached_tokens
        )


@value
class CommitReply:
    """The store's reply to a plan."""

    grants: tuple[Grant, ...] = ()
    """Requests that were dispatched, in order."""
    queue: QueueHead | None = None
    """The queue as it is now: where the plan was stale, or there is more room."""


class GrantingPort(Protocol):
    """Calls that granting makes."""

    def commit(self, plan: QueuePlan, /) -> Awaitable[CommitReply]: ...


@value
class Commit(Step[GrantingPort, CommitReply]):
    """Carry a plan out."""

    plan: QueuePlan

    def on(self, port: GrantingPort) -> Awaitable[CommitReply]:
        return port.commit(self.plan)


def grant_queue(queue: QueueHead | None, order: QueueOrder) -> Steps[GrantingPort, int]:
    """Returns how many requests were dispatched. A planner that dies between two steps costs nothing."""
    granted = 0
    for _ in range(MAX_PLANS):
        if queue is None:
            break
        plan = plan_queue(queue, order)
        if not plan.steps:
            break
        reply = yield from Commit(plan)
        granted += len(reply.grants)
        queue = reply.queue
    return granted
