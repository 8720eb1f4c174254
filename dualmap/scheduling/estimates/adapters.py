"""Adapters of an instance: which of them its engine has where, and what one costs that is not on the device.

An engine computes requests of few adapters at a time (vLLM's ``max_loras``): these have a slot on the device. A larger
number (``max_cpu_loras``) has one in host memory, those on the device among them. Both are lists by last use: each step
uses the adapters that it computes requests of, so those of running requests come first, then that whose last request
ended last. So the place of an adapter in this one order says where it is. Source: vLLM 0.33,
``LRUCacheWorkerLoRAManager``.

The engine loads an adapter between two steps and computes nothing meanwhile. Where more adapters run than it has slots,
requests of the others wait until one of these has no request left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class AdapterRoom(Protocol):
    """The room for adapters of an instance, as its record has it (``scheduling.state.instance.InstanceSpec``)."""

    @property
    def adapter_slots(self) -> int: ...
    @property
    def adapter_host_slots(self) -> int: ...
    @property
    def adapter_host_ms(self) -> int: ...
    @property
    def adapter_disk_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Residency:
    """The adapters that an engine reports to have."""

    device: frozenset[str]
    loaded: frozenset[str]
    """Those on the device, and those in host memory alone."""


PRIOR_ANSWER_S = 6.0
"""Time for which an answer uses its adapter, before the pool has shown any: some hundred tokens."""


USUAL_RANK = 16
"""The rank of the adapters whose loads take as long as the description of an instance says."""
LEAST_SHARE = 0.25
"""A load takes at least this share of that: files are opened, and slots emptied, whatever the rank."""


def load_share(rank: int) -> float:
    """Time of the loads of an adapter of this rank as a multiple of the described one, since its weights grow with its
    rank; 1 where it is not known (0)."""
    return max(LEAST_SHARE, rank / USUAL_RANK) if rank else 1.0


def adapter_host_s(instance: AdapterRoom, place: int, share: float) -> float:
    """Time of the load of an adapter from host memory onto the device, in seconds.

    ``place`` is that of the adapter in the instance's order by last use, from 0 on; one that is not in it has the place
    behind the last. ``share`` is its ``load_share``. The scripts run this rule and the next two.
    """
    return 0.0 if place < instance.adapter_slots else share * instance.adapter_host_ms / 1000


def adapter_disk_s(instance: AdapterRoom, place: int, share: float) -> float:
    """Time of its load into host memory before that."""
    kept = max(instance.adapter_slots, instance.adapter_host_slots)
    return 0.0 if place < kept else share * instance.adapter_disk_ms / 1000


def slot_turns(instance: AdapterRoom, running: int, requests: int) -> float:
    """Time until an adapter that is not on the device has a slot there, in answers.

    ``running`` adapters have requests there, and leave one after the other. Each of the slots becomes free once in the
    time of the answers of one adapter: of ``requests`` that run each has so many, of which the next one begins before
    the last has ended.
    """
    waiting = max(0, running - instance.adapter_slots + 1)
    return waiting / instance.adapter_slots * max(1.0, requests / max(1, running))
