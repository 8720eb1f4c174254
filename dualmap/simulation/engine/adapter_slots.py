"""Adapters of an engine: slots on the device and in host memory, both by last use, as vLLM keeps them.

A step computes requests of as many adapters as there are slots on the device; requests of others are passed over until
a slot is free. An adapter that is not on the device is loaded between two steps, and the engine computes nothing
meanwhile. One that is not in host memory either comes from disk first. The adapter used longest ago leaves; one that a
running request needs stays. Source: vLLM 0.33, ``LRUCacheWorkerLoRAManager`` and the scheduler's ``scheduled_loras``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """The room of an engine for adapters, and the time that one takes to come. An engine without slots has all at
    hand."""

    slots: int = 0
    """Adapters on the device (vLLM's ``max_loras``)."""
    host_slots: int = 0
    """Adapters in host memory, those on the device among them (``max_cpu_loras``)."""
    host_s: float = 0.02
    """Time from host memory to the device: 80 MB of rank 16 for a 7B model, layer by layer."""
    disk_s: float = 0.5
    """Time from disk into host memory."""

    def __post_init__(self) -> None:
        if self.slots and self.host_slots < self.slots:
            raise ValueError("host memory holds at least the adapters that are on the device")


@dataclass(slots=True)
class AdapterCounts:
    """Loads since the engine started."""

    to_device: int = 0
    from_disk: int = 0
    """Those that came from disk first."""


class AdapterSlots:
    """The adapters of one engine at a moment."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory
        self._running: Counter[str] = Counter()
        """Running requests by adapter."""
        self._device: OrderedDict[str, None] = OrderedDict()
        self._host: OrderedDict[str, None] = OrderedDict()
        """By last use, the one used longest ago first."""
        self.counts = AdapterCounts()

    @property
    def running(self) -> tuple[str, ...]:
        """The adapters of running requests."""
        return tuple(self._running)

    @property
    def on_device(self) -> tuple[str, ...]:
        """The adapters on the device, the one used longest ago first."""
        return tuple(self._device)

    @property
    def in_host(self) -> tuple[str, ...]:
        return tuple(self._host)

    def may_run(self, adapter: str) -> bool:
        """Whether a request of the adapter may run in the next step."""
        return not adapter or not self._memory.slots or adapter in self._running or self._has_slot()

    def _has_slot(self) -> bool:
        return len(self._running) < self._memory.slots

    def enter(self, adapter: str, share: float = 1.0) -> float:
        """A request of the adapter begins to run; returns the time that its load takes, in seconds: this ``share`` of
        the usual one."""
        memory = self._memory
        if not adapter or not memory.slots:
            return 0.0
        self._running[adapter] += 1
        taken_s = 0.0
        if adapter not in self._host:
            self._make_room(self._host, memory.host_slots)
            taken_s += memory.disk_s
            self.counts.from_disk += 1
        if adapter not in self._device:
            self._make_room(self._device, memory.slots)
            taken_s += memory.host_s
            self.counts.to_device += 1
        self._use(adapter)
        return share * taken_s

    def load(self, adapter: str, *, replaces: bool = False) -> float:
        """Load an adapter that no request needs yet, or its new weights; returns the time that this takes, in
        seconds."""
        if replaces:
            for kept in (self._host, self._device):
                kept.pop(adapter, None)
        taken_s = self.enter(adapter)
        self.leave(adapter)
        return taken_s

    def start_with(self, adapters: Iterable[str]) -> None:
        """Load these one after the other, before anything is counted."""
        for adapter in adapters:
            self.load(adapter)
        self.counts = AdapterCounts()

    def leave(self, adapter: str) -> None:
        """A request of the adapter runs no more: it was used by the step that has ended."""
        if adapter and self._memory.slots:
            self._use(adapter)
            self._running[adapter] -= 1
            if not self._running[adapter]:
                del self._running[adapter]

    def _use(self, adapter: str) -> None:
        for kept in (self._host, self._device):
            kept[adapter] = None
            kept.move_to_end(adapter)

    def _make_room(self, kept: OrderedDict[str, None], slots: int) -> None:
        while len(kept) >= slots:
            oldest = next((each for each in kept if each not in self._running), None)
            if oldest is None:
                return
            del kept[oldest]
            self._device.pop(oldest, None)
