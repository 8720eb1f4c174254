"""Separation of paths: requests for instances, and those for the ASGI app on the same port.

Every path goes to an instance that is neither the app's nor likely a mistake: engines have more paths than are known
here. Paths that manage an engine go to all instances, by the app, or are refused (``router.forbidden_paths``).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from dualmap.router.prompts.inference_request import RESPONSES_PATH, SCHEDULED_PATHS
from dualmap.router.requests.metaserver import FOLDER as METASERVER_FOLDER
from dualmap.router.telemetry.port_metrics import COUNTS_PATH

PASSTHROUGH_PATHS = frozenset(
    {
        "/v1/messages/count_tokens",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/messages/render",
        "/v1/responses/render",
        "/detokenize",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
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
ABORT_PATH = "/inference/v1/abort_requests"
"""Goes to every instance too, as only one has the request; with the key of a client, whose requests they are."""

INFERENCE_PATHS = SCHEDULED_PATHS | PASSTHROUGH_PATHS
"""The known paths that go to an instance, as do those for stored responses, and unknown ones."""

_STORED_RESPONSES = RESPONSES_PATH + "/"
_OWN_PATHS: Final = frozenset(
    {
        "/", "/admin", "/docs", "/favicon.ico", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/ready",
        "/redoc", "/ui", "/v1/models", "/v1/usage", "/version", COUNTS_PATH, ABORT_PATH,
        METASERVER_FOLDER.rstrip("/"),
        *ENGINE_CONTROL_PATHS,
    }
)  # fmt: skip
_OWN_FOLDERS: Final = ("/admin/", "/docs/", "/metrics/", "/ui/", "/v1/models/", METASERVER_FOLDER)
_ANY_METHOD: Final = "GET, POST, PUT, PATCH, DELETE, OPTIONS"

_ESCAPED: Final = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def meant_path(path: str) -> str:
    """The path that a client means: without a slash at its end, or several in a row, or escapes that say nothing (RFC
    3986 section 6.2.2.2). ``/ui/`` stays, as a page there would look for its files elsewhere."""
    if "%" in path:
        path = _ESCAPED.sub(_unescaped, path)
    if "//" in path:
        path = re.sub("//+", "/", path)
    if path.endswith("/") and path not in ("/", "/ui/"):
        path = path[:-1]
    return path


def _unescaped(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16))
    return character if character in _UNRESERVED else found[0]


def is_inference(path: str) -> bool:
    """Whether requests for the path go to an instance."""
    if path in INFERENCE_PATHS or path.startswith(_STORED_RESPONSES):
        return True
    return path.startswith("/") and not is_own(path) and likely_meant(path) is None


def is_own(path: str) -> bool:
    """Whether the ASGI app has the path, or those below it."""
    return path in _OWN_PATHS or path.startswith(_OWN_FOLDERS)


def stored_response_id(path: str) -> str | None:
    """The response that ``/v1/responses/ID``, or a path below it, is about; None for any other path."""
    if not path.startswith(_STORED_RESPONSES) or path in PASSTHROUGH_PATHS:
        return None
    return unquote(path[len(_STORED_RESPONSES) :].partition("/")[0])


def methods_of(path: str) -> str:
    """The ``Allow`` of an inference path."""
    if path in INFERENCE_PATHS:
        return "POST, OPTIONS"
    if stored_response_id(path) is None:
        return _ANY_METHOD
    return "POST, OPTIONS" if path.endswith("/cancel") else "GET, DELETE, OPTIONS"


def needs_api_key(path: str) -> bool:
    """True for the paths of models' clients: inference, and models and usage, which the ASGI app serves."""
    return is_inference(path) or path in ("/v1/models", "/v1/usage") or path.startswith("/v1/models/")


def needs_admin(path: str) -> bool:
    """True for the paths of operators, which ``router.admin_key`` closes: administration, its page, engine control."""
    return path in ENGINE_CONTROL_PATHS or path in ("/admin", "/ui") or path.startswith(("/admin/", "/ui/"))


def likely_meant(path: str) -> str | None:
    """The known path that a client with a wrong base URL probably meant by an unknown one: with the ``/v1`` that is
    missing, or without the extra parts before its last ``/v1``."""
    path = "/" + path.strip("/")
    last_v1 = path.rfind("/v1/")
    similar = f"/v1{path}" if last_v1 < 0 else path[last_v1:]
    known = similar != path and (similar in INFERENCE_PATHS or is_own(similar))
    return similar if known else None


def forbidden_path_finder(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path is one that is not passed on: it matches one of these, in which ``*`` stands for anything, or is
    below it. However it is written: servers and proxies resolve escapes and dots."""
    forbidden = re.compile("|".join(translate(pattern) for pattern in patterns) or "(?!)")

    @lru_cache(maxsize=1024)
    def is_forbidden(path: str) -> bool:
        path = posixpath.normpath("/" + unquote(path).lstrip("/"))
        while path != "/":
            if forbidden.match(path):
                return True
            path = posixpath.dirname(path)
        return False

    return is_forbidden
