"""Notification of the exchanges on an instance that the fleet gave up.

An engine that hangs keeps its connections open, and so does a server that is stopping: no connection breaks, and their
requests would wait for their timeouts. The leading worker detects it from outside and takes the instance down, or parks
it if it was draining; every refresh of the view compares.
"""

from __future__ import annotations

from typing import Final, Protocol

from dualmap.runtime.clock import Clock
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.instance_lifecycle import SERVING
from dualmap.scheduling.state.view import ClusterView

GONE_S: Final = 10.0
"""An instance that is missing or out of service, but not down, counts as gone after this long: a store that came back
empty is filled step by step, and a drain waits only for the requests that are counted on the instance, not for those
that are passed through, which may just be finishing."""


class InstanceLossListener(Protocol):
    """One try of a request on an instance."""

    def instance_lost(self, why: str) -> bool:
        """The fleet gave the instance up. True if this try ends, False if the client has seen a byte of the answer
        (which may still finish). Must not wait."""

    def instance_down(self, why: str) -> None:
        """The instance is down: break off an answer that has begun if it has fallen silent. Called at every check; must
        not wait."""

    def instance_leaves(self, why: str) -> None:
        """The instance is not to have this try any more: another one takes it over, if it can. Called at every check;
        must not wait."""


class InstanceLossNotifier:
    """The tries of one pool on one replica, by instance.

    A check costs what the instances in use cost, and the tries of those that left; a request costs two set operations.
    It goes by the state, not by its change, so a try that arrived at an instance too late is found by the next check.
    """

    def __init__(self, retries: RetryBudget, clock: Clock, drain_within_s: float | None = None) -> None:
        """``drain_within_s``: time after which what a draining instance has goes elsewhere, unless it says another."""
        self._retries = retries
        self._clock = clock
        self._drain_within_s = drain_within_s
        self._draining_since_s: dict[str, float] = {}
        self._listeners: dict[str, set[InstanceLossListener]] = {}
        self._away_since_s: dict[str, float] = {}

    def watch(self, instance_id: str, listener: InstanceLossListener) -> None:
        """Call ``listener`` when the instance leaves; the caller must call ``unwatch``."""
        self._listeners.setdefault(instance_id, set()).add(listener)

    def unwatch(self, instance_id: str, listener: InstanceLossListener) -> None:
        listeners = self._listeners.get(instance_id)
        if listeners is not None:
            listeners.discard(listener)
            if not listeners:
                del self._listeners[instance_id]

    def check(self, view: ClusterView) -> None:
        """Notify answers that have begun on an instance that is down; and of the tries that wait for one that is down,
        or gone for ``GONE_S``, as many as may be tried again now.

        The others stay where they are until a later check: an instance that is back by then may still answer them. All
        of them stay while no other instance is ready.
        """
        now_s = self._clock.monotonic_s()
        self._note_away(view, now_s)
        self._tell_begun(view)
        self._note_draining(view, now_s)
        if not view.ready:
            return
        self._tell_leaving(view, now_s)
        retries = self._retries.available(now_s)
        for instance_id in tuple(self._listeners):
            why = self._loss(view, instance_id, now_s)
            if why is not None:
                retries -= self._tell(instance_id, why, retries)

    def _note_draining(self, view: ClusterView, now_s: float) -> None:
        draining = [name for name in self._listeners if _is_draining(view.instances.get(name))]
        self._draining_since_s = {name: self._draining_since_s.get(name, now_s) for name in draining}

    def _tell_leaving(self, view: ClusterView, now_s: float) -> None:
        """Notify all that a draining instance has for longer than it may."""
        for instance_id, since_s in self._draining_since_s.items():
            within_s = view.instances[instance_id].drain_within_s
            if within_s is None:
                within_s = self._drain_within_s
            if within_s is not None and now_s - since_s >= within_s:
                for listener in tuple(self._listeners[instance_id]):
                    listener.instance_leaves(f"instance {instance_id} drains")

    def _tell_begun(self, view: ClusterView) -> None:
        for instance_id, listeners in self._listeners.items():
            if _is_down(view.instances.get(instance_id)):
                for listener in tuple(listeners):
                    listener.instance_down(f"instance {instance_id} is down and has fallen silent")

    def _tell(self, instance_id: str, why: str, at_most: float) -> int:
        """How many tries ended."""
        let_go = 0
        for listener in tuple(self._listeners[instance_id]):
            if let_go + 1 > at_most:
                break
            let_go += listener.instance_lost(why)
        return let_go

    def _note_away(self, view: ClusterView, now_s: float) -> None:
        away = [name for name in self._listeners if not _serves(view.instances.get(name))]
        self._away_since_s = {name: self._away_since_s.get(name, now_s) for name in away}

    def _loss(self, view: ClusterView, instance_id: str, now_s: float) -> str | None:
        """Why the instance will not answer; None if it may."""
        spec = view.instances.get(instance_id)
        if _serves(spec):
            return None
        if _is_down(spec):
            return f"instance {instance_id} was taken down"
        if now_s - self._away_since_s[instance_id] < GONE_S:
            return None
        return f"instance {instance_id} was {'removed' if spec is None else 'taken out of service'}"


def _is_down(spec: InstanceSpec | None) -> bool:
    return spec is not None and spec.state is InstanceState.DOWN


def _is_draining(spec: InstanceSpec | None) -> bool:
    return spec is not None and spec.state is InstanceState.DRAINING


def _serves(spec: InstanceSpec | None) -> bool:
    return spec is not None and spec.state in SERVING
