"""Where an instance publishes its KV events."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from dualmap.runtime.pool_settings import PoolSettings, fill_endpoint
from dualmap.scheduling.state.instance import InstanceSpec


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
        endpoint_of(spec, events.endpoint),
        None if events.replay_endpoint is None else endpoint_of(spec, events.replay_endpoint),
        events.topic,
        spec.data_parallel_rank,
    )


def endpoint_of(spec: InstanceSpec, template: str) -> str:
    """Where this instance publishes. Of a rank of data parallelism, as vLLM has it: its number is added to the port."""
    parts, rank = urlsplit(spec.url), spec.data_parallel_rank
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    filled = fill_endpoint(template, f"[{host}]" if ":" in host else host, port)
    if not rank or not filled.startswith("tcp://"):
        return filled + (f"_dp{rank}" if rank else "")
    address, _, base = filled.rpartition(":")
    return f"{address}:{int(base) + rank}"
