"""Which requests the data plane serves itself; every other path belongs to the ASGI app on the same port."""

from __future__ import annotations

from urllib.parse import unquote

from router.inference_request import RESPONSES_PATH, SCHEDULED_PATHS

PASSTHROUGH_PATHS = frozenset(
    {
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/detokenize",
        "/inference/v1/generate",
        "/tokenize",
    }
)
"""Paths of vLLM's own server that any suitable instance answers, without scheduling by prefix."""

ENGINE_CONTROL_PATHS = {
    "/reset_prefix_cache": "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/start_profile": "POST",
    "/stop_profile": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/release_kv_cache_memory": "POST",
    "/pause": "POST",
    "/resume": "POST",
    "/is_paused": "GET",
    "/collective_rpc": "POST",
    "/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
}
"""Paths of vLLM's own server by which its operator controls an engine, and their methods: they go to every instance of
a pool, and never to one alone."""

INFERENCE_PATHS = SCHEDULED_PATHS | PASSTHROUGH_PATHS
"""Requests for these go to an instance, as do those for stored responses."""

_STORED_RESPONSES = RESPONSES_PATH + "/"


def is_inference(path: str) -> bool:
    """Whether requests for the path go to an instance."""
    return path in INFERENCE_PATHS or path.startswith(_STORED_RESPONSES)


def stored_response_id(path: str) -> str | None:
    """The response that ``/v1/responses/ID``, or a path below it, is about; None for any other path."""
    if not path.startswith(_STORED_RESPONSES):
        return None
    return unquote(path[len(_STORED_RESPONSES) :].partition("/")[0])


def methods_of(path: str) -> str:
    """The ``Allow`` of an inference path."""
    if stored_response_id(path) is None:
        return "POST, OPTIONS"
    return "POST, OPTIONS" if path.endswith("/cancel") else "GET, DELETE, OPTIONS"


def needs_api_key(path: str) -> bool:
    """True for the paths of models' clients: inference, and the list of models that the ASGI app serves."""
    return is_inference(path) or path == "/v1/models" or path.startswith("/v1/models/")


def similar_paths(path: str) -> list[str]:
    """Paths that a client may have meant by one that does not exist: without the slashes at its end, with the ``/v1``
    that its base URL lacks, or without the extra parts before its last ``/v1``."""
    path = "/" + path.strip("/")
    last_v1 = path.rfind("/v1/")
    return [path, f"/v1{path}"] if last_v1 < 0 else [path, path[last_v1:]]
