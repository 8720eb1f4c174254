"""Where an instance publishes its KV events."""

from __future__ import annotations

from dataclasses import dataclass

from scheduling.instance import InstanceSpec
from statestore.settings import PoolSettings


@dataclass(frozen=True, slots=True)
class EventSource:
    """One publisher."""

    instance_id: str
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int | None = None
    """Of data parallelism: events of another one are refused."""


def source_of(spec: InstanceSpec, settings: PoolSettings) -> EventSource | None:
    """By the instance's own configuration, else by its pool's; None if neither says where it publishes."""
    own = next((each.kv_events for each in settings.instances if each.id == spec.instance_id), None)
    events = own or settings.kv_events
    if events is None:
        return None
    return EventSource(
        spec.instance_id,
        events.endpoint_of(spec.url, spec.data_parallel_rank),
        events.replay_endpoint_of(spec.url, spec.data_parallel_rank),
        events.topic,
        spec.data_parallel_rank,
    )
