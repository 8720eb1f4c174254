"""What the legs of a split request are told, by the KV connector of the engines."""

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
"""Of a prefill leg whose decoder pulls: vLLM's NixlConnector and MooncakeConnector, vLLM-Ascend's MooncakeConnectorV1.
The answer has what the decode leg gets, whatever the connector puts there."""


def layerwise_decode_params(metaserver_url: str) -> dict[str, Any]:
    """Of a decode leg that goes first and asks for its prefill leg: vLLM-Ascend's MooncakeLayerwiseConnector. What it
    posts there is what the prefill leg gets."""
    return {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": metaserver_url}
