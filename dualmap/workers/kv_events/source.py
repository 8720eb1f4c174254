"""The source of an instance's KV events: where it publishes them."""

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
    """Rank of data parallelism: events of another rank are refused."""


def source_of(spec: InstanceSpec, settings: PoolSettings) -> EventSource | None:
    """The source by the instance's own configuration, else by its pool's; None if neither says where it publishes."""
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
    """The endpoint at which this instance publishes. For a rank of data parallelism its number is added to the port, as
    vLLM does."""
    parts, rank = urlsplit(spec.url), spec.data_parallel_rank
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    filled = fill_endpoint(template, f"[{host}]" if ":" in host else host, port)
    if not rank or not filled.startswith("tcp://"):
        return filled + (f"_dp{rank}" if rank else "")
    address, _, base = filled.rpartition(":")
    return f"{address}:{int(base) + rank}"
