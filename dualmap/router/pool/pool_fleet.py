"""One pool as the rules of its requests see it: the view, the breakers, and the loads that replies had last."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from dualmap.router.pool.view import ViewKeeper
from dualmap.scheduling.placing.placement import Observation
from dualmap.scheduling.request.breakers import CircuitBreakers
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.statestore.errors import UnreadableStateError

LEARNING_GAP_S = 0.01
"""Shortest time between two first tokens of a replica that the TTFT is learned from: thousands a second would teach no
more, and for each a load has to be made."""

_NONE: frozenset[str] = frozenset()


class PoolFleet:
    """The fleet of ``scheduling.request.machine``."""

    def __init__(self, keeper: ViewKeeper, breakers: CircuitBreakers, now_s: Callable[[], float]) -> None:
        self.sight: Final = keeper
        self._breakers = breakers
        self._now_s = now_s
        self._next_learning_s = -math.inf
        self._seen: dict[str, Mapping[str, InstanceLoad]] = {}
        """Loads, for each instance, of the last reply that had its own: for estimates, never for decisions."""

    def blocked(self) -> frozenset[str]:
        return self._breakers.blocked(self._now_s()) if self._breakers.troubled else _NONE

    def note(self, seen: Observation) -> None:
        """Note what a call found: loads, and whether the view is out of date."""
        view, loads = self.sight.view, seen.loads
        # The test is not "newer than": a store that came back empty counts from the start again.
        if seen.epoch != view.epoch or seen.tree_version != view.tree_version:
            self.sight.renew()
        self._seen.update(dict.fromkeys(loads, loads))

    def teaches(self) -> bool:
        """Whether the next first token is one that the TTFT is learned from."""
        now_s = self._now_s()
        if now_s < self._next_learning_s:
            return False
        self._next_learning_s = now_s + LEARNING_GAP_S
        return True

    # estimates ----------------------------------------------------------------------------------------------
    def forget_departed(self) -> None:
        """Drop what is kept about instances that left the fleet."""
        for instance_id in self._seen.keys() - self.sight.view.instances.keys():
            del self._seen[instance_id]

    def _load(self, instance_id: str) -> InstanceLoad | None:
        seen = self._seen.get(instance_id)
        try:
            return None if seen is None else seen[instance_id]
        except UnreadableStateError:
            return None

    def rates(self) -> dict[str, float]:
        """Prefill rates of the instances that were seen, tokens per second."""
        loads = ((instance_id, self._load(instance_id)) for instance_id in self._seen)
        return {instance_id: load.prefill_tokens_per_s for instance_id, load in loads if load is not None}

    def expected_wait_s(self, instance_id: str) -> float:
        """Time until the instance has prefilled what is pending on it."""
        load = self._load(instance_id)
        return load.pending_tokens / max(1.0, load.prefill_tokens_per_s) if load is not None else 1.0

    def window_delay_s(self, spec: InstanceSpec, uncached_tokens: int) -> float:
        """Time until the instance has prefilled a full dispatch window, and so many tokens behind it."""
        load = self._load(spec.instance_id)
        rate = spec.prefill_tokens_per_s if load is None else load.prefill_tokens_per_s
        return (spec.dispatch_window_tokens + uncached_tokens) / max(1.0, rate)
