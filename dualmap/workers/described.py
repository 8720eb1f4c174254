"""An instance's own report as changes of its description: vLLM's flags need not be copied into a file."""

from __future__ import annotations

from collections.abc import Mapping

from dualmap.runtime.pool_settings import AdapterSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.workers.probe import EngineFacts

WINDOW_STEPS = 2
"""Engine steps in a dispatch window: one that runs, and one that waits."""

_DEFAULTS = InstanceSpec("", "")

Limits = Mapping[str, int]


def reported_limits(facts: EngineFacts) -> dict[str, int]:
    """Dispatch window and running requests, as far as they follow from what the server reports."""
    limits = {}
    if facts.max_num_batched_tokens:
        limits["dispatch_window_tokens"] = WINDOW_STEPS * facts.max_num_batched_tokens
    if facts.max_num_seqs:
        limits["max_running_requests"] = facts.max_num_seqs
    return limits


def adapter_room(
    spec: InstanceSpec, slots: int | None, host_slots: int | None, adapters: AdapterSettings
) -> dict[str, int]:
    """The fields of its room for adapters to change, by the slots that it reports: what is configured wins. Where
    neither is known, what was known stays: vLLM reports its slots from its first request for an adapter on."""
    slots = adapters.slots or slots
    if slots is None:
        return {}
    host_slots = max(slots, adapters.host_slots or host_slots or slots)
    times = {"adapter_host_ms": adapters.host_ms, "adapter_disk_ms": adapters.disk_ms}
    room = {"adapter_slots": slots, "adapter_host_slots": host_slots, **times}
    return {name: each for name, each in room.items() if each != getattr(spec, name)}


def reported_changes(spec: InstanceSpec, facts: EngineFacts, former: Limits) -> dict[str, int]:
    """The fields to change, with their values.

    A reported KV capacity, block size or dropped block always wins. A limit wins over the default, and over
    ``former``, what this worker entered by an earlier report; any other was set by an operator.
    """
    changes = {}
    for name, value in (
        ("kv_capacity_tokens", facts.kv_capacity_tokens),
        ("block_tokens", facts.block_tokens),
        ("dropped_blocks", facts.dropped_blocks),
    ):
        if value is not None and value != getattr(spec, name):
            changes[name] = value
    for name, limit in reported_limits(facts).items():
        present = getattr(spec, name)
        if limit != present and present in (getattr(_DEFAULTS, name), former.get(name)):
            changes[name] = limit
    return changes
