"""The source of an instance's KV events: where it publishes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
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
    """The source by the instance's own configuration, else by its pool's; None if neither says where it publishes, as
    where the instance is to be asked."""
    own = next((each.kv_events for each in settings.instances if each.id == spec.instance_id), None)
    events = own or settings.kv_events
    if events is None or isinstance(events, str):
        return None
    return EventSource(
        spec.instance_id,
        endpoint_of(spec, events.endpoint),
        None if events.replay_endpoint is None else endpoint_of(spec, events.replay_endpoint),
        events.topic,
        spec.data_parallel_rank,
    )


def source_said(spec: InstanceSpec, sources: Any) -> EventSource | None:
    """The source by the instance's own answer (vLLM's ``GET /kv_event_sources``): a publisher for each rank. Only its
    ports count: the host is that of the instance. None where it publishes nothing that can be followed; nor can an
    instance be whose ranks publish apart."""
    if not isinstance(sources, dict) or (spec.data_parallel_rank is None and len(sources) != 1):
        return None
    rank = spec.data_parallel_rank
    said = next(iter(sources.values())) if rank is None else sources.get(str(rank))
    if not isinstance(said, dict) or said.get("publisher") != "zmq" or said.get("enable_kv_cache_events") is not True:
        return None
    ports = [_port_of(said.get(name)) for name in ("endpoint", "replay_endpoint")]
    if ports[0] is None:
        return None
    host = urlsplit(spec.url).hostname or ""
    there = f"[{host}]" if ":" in host else host
    endpoint, replay_endpoint = (None if port is None else f"tcp://{there}:{port}" for port in ports)
    assert endpoint is not None
    topic = said.get("topic")
    return EventSource(spec.instance_id, endpoint, replay_endpoint, topic if isinstance(topic, str) else "", rank)


def _port_of(endpoint: Any) -> int | None:
    found = re.fullmatch(r"tcp://.*:(\d{1,5})", endpoint) if isinstance(endpoint, str) else None
    return int(found[1]) if found and 0 < int(found[1]) < 65536 else None


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
