"""``kv_transfer_params`` of the legs of a split request, by the KV connector of the engines."""

from __future__ import annotations

from typing import Any, Final

PREFILL_PARAMS: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Params of a prefill leg whose decoder pulls: vLLM's NixlConnector and MooncakeConnector, vLLM-Ascend's
MooncakeConnectorV1. The decode leg gets what the answer has there, whatever the connector puts there."""


def layerwise_decode_params(metaserver_url: str) -> dict[str, Any]:
    """Params of a decode leg that goes first and requests its prefill leg: vLLM-Ascend's MooncakeLayerwiseConnector.
    The prefill leg gets what the decoder posts there."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": metaserver_url}
