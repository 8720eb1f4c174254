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
