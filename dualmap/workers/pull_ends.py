"""The part that an instance takes in pulls, as its ``/server_info`` says, or the settings where that is silent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from dualmap.runtime.pool_settings import PullSettings, fill_endpoint
from dualmap.scheduling.state.instance import InstanceSpec

DEFAULT_PORT: Final = 5710
"""The port of vLLM's tier of type ``p2p``, to which each rank of data parallelism adds its number."""
_ANY_HOST: Final = frozenset({"", "localhost", "0.0.0.0", "::", "*"})
"""Hosts that mean the server's own, whatever its peers call that."""
_HOST: Final = re.compile(r"[0-9A-Za-z.:%_-]{1,253}", re.ASCII)
"""A name or an address: placements hand it on as it is."""
_MOST_CHARS: Final = 1000
"""Every placement reads the layout."""
_LAYOUT: Final = (
    ("model_config", "model"),
    ("model_config", "dtype"),
    ("cache_config", "block_size"),
    ("cache_config", "cache_dtype"),
    ("parallel_config", "tensor_parallel_size"),
    ("parallel_config", "pipeline_parallel_size"),
)
"""The figures of a server's configuration by which its blocks are like those of another."""
BY_SETTINGS: Final = "by the settings"
"""The layout of instances that do not say theirs: the settings claim that all are alike."""


@dataclass(frozen=True, slots=True)
class PullPlace:
    """Where others pull from an instance, and what it does when a pull to it is lost."""

    host: str
    port: int
    layout: str
    fails_requests: bool


def pull_place_of(info: bytes | None, spec: InstanceSpec, settings: PullSettings) -> PullPlace | None:
    """The place by a ``/server_info`` answer, or by the settings where there is none (``info`` is None). None:
    something is unknown, so that nothing is pulled to or from the instance."""
    if info is None:
        return _by_settings(spec, settings)
    config = _at(_json(info), "vllm_config")
    transfer = _at(config, "kv_transfer_config")
    tier = _p2p_tier(_at(transfer, "kv_connector_extra_config").get("secondary_tiers"))
    policy = transfer.get("kv_load_failure_policy")
    if tier is None or policy not in ("fail", "recompute"):
        return None
    layout = ", ".join([f"{name} {_at(config, part).get(name)}" for part, name in _LAYOUT])
    port = tier.get("port") or DEFAULT_PORT
    if type(port) is not int or not 0 < port + (spec.data_parallel_rank or 0) < 65_536:
        return None
    named = tier.get("host")
    host = named if isinstance(named, str) and named not in _ANY_HOST else _host_of(spec)
    if not _HOST.fullmatch(host) or len(layout) > _MOST_CHARS:
        return None
    return PullPlace(host, port + (spec.data_parallel_rank or 0), layout, policy == "fail")


def _by_settings(spec: InstanceSpec, settings: PullSettings) -> PullPlace | None:
    if settings.port is None or settings.failure_policy is None:
        return None
    at = urlsplit(spec.url)
    own = at.port or (443 if at.scheme == "https" else 80)
    port = int(fill_endpoint(str(settings.port), "", own)) + (spec.data_parallel_rank or 0)
    if not 0 < port < 65_536:
        return None
    return PullPlace(_host_of(spec), port, BY_SETTINGS, settings.failure_policy == "fail")


def _host_of(spec: InstanceSpec) -> str:
    return urlsplit(spec.url).hostname or ""


def _p2p_tier(tiers: object) -> Mapping[str, Any] | None:
    for each in tiers if isinstance(tiers, list) else ():
        if isinstance(each, dict) and each.get("type") == "p2p":
            return each
    return None


def _json(body: bytes) -> Mapping[str, Any]:
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return document if isinstance(document, dict) else {}


def _at(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
