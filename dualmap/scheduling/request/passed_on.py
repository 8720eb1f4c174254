"""Balancing of requests that are not scheduled by prefix: to the less busy of two suitable instances, with no
reservation. Where prefill and decode are apart, these are answered whole by an instance that decodes."""

from __future__ import annotations

from collections import Counter

from dualmap.scheduling.placing.placement import Fleet
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg

# The golden ratio as a stride: with the turn itself it picks two instances, in ever different pairs.
_STRIDE = 0.6180339887498949


class PassedOnBalancer:
    """Requests that are passed on per instance, of this replica alone; the less loaded of two takes the next one."""

    def __init__(self) -> None:
        self._in_flight: Counter[str] = Counter()
        self._turn = 0

    def pick(self, ready: tuple[str, ...], avoided: frozenset[str]) -> str | None:
        """An instance outside of ``avoided``, in constant time while few are avoided; None if there is none."""
        self._turn += 1
        count = len(ready)
        if count == 0:
            return None
        pair = (ready[self._turn % count], ready[int(self._turn * _STRIDE * count) % count])
        fit = [instance_id for instance_id in pair if instance_id not in avoided]
        if not fit:
            fit = [instance_id for instance_id in ready if instance_id not in avoided]
        return min(fit, key=self._in_flight.__getitem__, default=None)

    def enter(self, instance_id: str) -> None:
        self._in_flight[instance_id] += 1

    def leave(self, instance_id: str) -> None:
        self._in_flight[instance_id] -= 1
        if self._in_flight[instance_id] <= 0:
            del self._in_flight[instance_id]


def pick_instance(
    fleet: Fleet,
    balancer: PassedOnBalancer,
    wanted: tuple[str, str],
    failed: frozenset[str],
    pinned_to: str | None,
) -> InstanceSpec | None:
    """An instance of the ``wanted`` model and revision that has not failed the request, preferably not behind an open
    breaker; None if there is none. ``pinned_to``: the only one that can answer."""
    view = fleet.sight.view
    if pinned_to is not None:
        return None if pinned_to in failed else view.instances.get(pinned_to)
    ready = view.serving(*wanted).of(Leg.DECODE).ready
    picked = balancer.pick(ready, failed | fleet.blocked())
    if picked is None:
        picked = balancer.pick(ready, failed)
    return None if picked is None else view.instances.get(picked)
