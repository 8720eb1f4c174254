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


TURN_S = 2.0
"""Time that a request waits for a slot where all are taken by adapters of running requests, for each adapter before it:
about what an answer of some hundred tokens takes."""


def adapter_s(instance: AdapterRoom, place: int, running: int) -> float:
    """Time until the adapter of a request is on the device, in seconds.

    ``place`` is that of the adapter in the instance's order by last use, from 0 on; one that is not in it has the place
    behind the last. ``running`` adapters have requests there. The scripts run the same rule.
    """
    slots, host_slots = instance.adapter_slots, instance.adapter_host_slots
    if place < slots:
        return 0.0
    waits_s = max(0, running - slots + 1) * TURN_S
    if place < host_slots:
        return waits_s + instance.adapter_host_ms / 1000
    return waits_s + (instance.adapter_host_ms + instance.adapter_disk_ms) / 1000
