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


PRIOR_ANSWER_S = 6.0
"""Time for which an answer uses its adapter, before the pool has shown any: some hundred tokens."""


def adapter_host_s(instance: AdapterRoom, place: int) -> float:
    """Time of the load of an adapter from host memory onto the device, in seconds.

    ``place`` is that of the adapter in the instance's order by last use, from 0 on; one that is not in it has the place
    behind the last. The scripts run this rule and the next two.
    """
    return 0.0 if place < instance.adapter_slots else instance.adapter_host_ms / 1000


def adapter_disk_s(instance: AdapterRoom, place: int) -> float:
    """Time of its load into host memory before that."""
    kept = max(instance.adapter_slots, instance.adapter_host_slots)
    return 0.0 if place < kept else instance.adapter_disk_ms / 1000


def slot_turns(instance: AdapterRoom, running: int) -> float:
    """Time until an adapter that is not on the device has a slot there, in answers: each of the slots becomes free once
    in the time of one, so ``running`` adapters, all of which have requests there, leave one after the other."""
    return max(0, running - instance.adapter_slots + 1) / instance.adapter_slots
