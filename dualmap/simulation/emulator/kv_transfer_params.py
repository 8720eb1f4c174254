"""``kv_transfer_params`` of a request, as vLLM's connectors read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dualmap.api_bodies.lax_values import lax_int
from dualmap.simulation.emulator.errors import bad_request
from dualmap.simulation.emulator.fields import Body, mapping

_FIELDS = ("remote_engine_id", "remote_host", "remote_port", "remote_request_id")


@dataclass(slots=True)
class KvTransferParams:
    """A request's instructions for its KV."""

    request_id: str
    """The parameters of the client."""
    stages: bool = False
    """A prefill leg."""
    awaits: bool = False
    """A decode leg."""
    source: dict[str, Any] | None = None
    """Source of a decode leg's KV; target of a layerwise prefill leg's KV."""
    metaserver: str | None = None
    """URL that a layerwise decode leg notifies once it has its blocks."""
    returned: dict[str, Any] | None = None
    """``kv_transfer_params`` of the answer."""


@dataclass(frozen=True, slots=True)
class PeerSource:
    """Another server, from whose cache a request's prompt is pulled."""

    host: str
    port: int

    def url(self, call: str) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/emulator/peer/{call}"


def read_peer_source(payload: Body) -> PeerSource | None:
    """The source that a request names; None: none, or an incomplete one, which vLLM ignores. Raises ApiError."""
    source = (mapping(payload, "kv_transfer_params") or {}).get("remote_kv_source")
    if not isinstance(source, dict) or not source.get("kv_request_id"):
        return None
    host, port = source.get("remote_host"), lax_int(source.get("remote_port"))
    return PeerSource(host, port) if isinstance(host, str) and host and port else None


def read_max_load_tokens(payload: Body) -> int | None:
    """The tokens that may be loaded from tiers for the request; None: all that they have. What is no whole number is
    ignored, as vLLM does. Raises ApiError."""
    wanted = (mapping(payload, "kv_transfer_params") or {}).get("max_load_tokens")
    return wanted if type(wanted) is int and wanted >= 0 else None


def read_kv_transfer_params(payload: Body, request_id: str) -> KvTransferParams | None:
    """Read ``kv_transfer_params``; None where the KV stays. Raises ApiError."""
    params = mapping(payload, "kv_transfer_params")
    if params is None:
        return None
    stages, awaits = params.get("do_remote_decode"), params.get("do_remote_prefill")
    if stages and awaits:
        raise bad_request("a request cannot both prefill and decode for another instance.", "kv_transfer_params")
    complete = all(params.get(name) is not None for name in _FIELDS)
    source = {name: params[name] for name in _FIELDS} if complete else None
    if stages:
        return KvTransferParams(request_id, stages=True, source=source)
    metaserver = params.get("metaserver")
    if awaits and (source is not None or isinstance(metaserver, str)):
        return KvTransferParams(
            request_id, awaits=True, source=source, metaserver=metaserver if source is None else None
        )
    return None  # vLLM warns of an incomplete source, and computes
