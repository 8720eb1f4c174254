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

from dualmap.router.errors import InvalidRequestError
from dualmap.router.prompts.inference_request import CHAT_PATH, RESPONSES_PATH, SCHEDULED_PATHS
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

FILES_PATH: Final = "/v1/files"
BATCHES_PATH: Final = "/v1/batches"
_STORED_RESPONSES = RESPONSES_PATH + "/"
_OWN_PATHS: Final = frozenset(
    {
        "/", "/admin", "/docs", "/favicon.ico", "/health", "/load", "/metrics", "/openapi.json", "/ping", "/ready",
        "/redoc", "/ui", BATCHES_PATH, FILES_PATH, "/v1/models", "/v1/usage", "/version", COUNTS_PATH, ABORT_PATH,
        METASERVER_FOLDER.rstrip("/"),
        *ENGINE_CONTROL_PATHS,
    }
)  # fmt: skip
_OWN_FOLDERS: Final = (
    "/admin/", "/docs/", "/metrics/", "/ui/", f"{BATCHES_PATH}/", f"{FILES_PATH}/", "/v1/models/", METASERVER_FOLDER,
)  # fmt: skip
_ANY_METHOD: Final = "GET, POST, PUT, PATCH, DELETE, OPTIONS"

_CLIENT_PATHS: Final = frozenset({BATCHES_PATH, FILES_PATH, "/v1/models", "/v1/usage"})
_CLIENT_FOLDERS: Final = (f"{BATCHES_PATH}/", f"{FILES_PATH}/", "/v1/models/")

NAME_FOLDERS: Final = (*_OWN_FOLDERS, _STORED_RESPONSES)
"""Folders of names that clients or operators chose: an escaped slash in what follows is part of a name."""

_ESCAPED: Final = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_SLASHES: Final = re.compile("(?:/|%2[Ff])+")
_DOTS: Final = frozenset({".", ".."})
_BARE_BESIDE_ESCAPE: Final = re.compile("%(?:%[0-9A-Fa-f]{2}|[0-9A-Fa-f]%[0-9A-Fa-f]{2})")
"""A percent sign that becomes a part of an escape when what follows is decoded."""
_UNCLEAR: Final = re.compile(r"[\x00-\x20\x7f\\]|%(?:[01][0-9A-Fa-f]|5[Cc]|7[Ff]|[Cc][01])")
"""A backslash, which some servers read as a slash; control characters; bytes that begin no character of UTF-8, by which
a slash can be written in several bytes."""


def split_target(target: str) -> tuple[str, str]:
    """The path and the query of a request's target as servers read it: a fragment belongs to neither."""
    if "?" not in target and "#" not in target:
        return target, ""
    path, _, query = target.partition("#")[0].partition("?")
    return path, query


def meant_path(path: str) -> str:
    """The path that a client means, which every rule is about, and which is sent on: decoded and folded once.

    Escapes that say nothing are decoded (RFC 3986 section 6.2.2.2), and so are escaped slashes, except in a name that
    clients choose (``NAME_FOLDERS``). Slashes in a row count as one, one at the end as none, and dot segments are
    resolved. ``/ui/`` stays, as a page there would look for its files elsewhere.

    Raises:
        InvalidRequestError: servers read it differently.
    """
    if path in INFERENCE_PATHS:
        return path
    if _UNCLEAR.search(path) is not None or ("%" in path and _BARE_BESIDE_ESCAPE.search(path) is not None):
        raise _unclear(path, "a backslash, a control character, or an escape of one")
    if "%" in path:
        path = _ESCAPED.sub(_unescaped, path)
    if "//" in path:
        path = re.sub("//+", "/", path)
    if "/." in path or "%" in path:
        path = _folded(path)
    if path.endswith("/") and path not in ("/", "/ui/"):
        path = path[:-1]
    return path


def _unescaped(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16))
    return character if character in _UNRESERVED else found[0]


def _folded(path: str) -> str:
    """The path without dot segments and, outside of names, without escaped slashes."""
    segments: list[str] = []
    pos = 0
    while (slash := _SLASHES.match(path, pos)) is not None:
        pos = slash.end()
        folder = "/".join(("", *segments, ""))
        if folder in NAME_FOLDERS:
            return folder + _checked_name(path, path[pos:])
        following = _SLASHES.search(path, pos)
        segment = path[pos : len(path) if following is None else following.start()]
        pos += len(segment)
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    if pos != len(path):  # no path: it does not begin with a slash
        return path
    if "%25" in path:
        raise _unclear(path, "an escaped percent sign")
    return "/".join(("", *segments)) or "/"


def _checked_name(path: str, name: str) -> str:
    """A name behind a folder, and perhaps what belongs to it, with its escapes."""
    decoded = unquote(name.removesuffix("/"), "latin-1")
    if _ESCAPED.search(decoded) is not None:
        raise _unclear(path, "an escape of an escape")
    segments = decoded.split("/")
    if not _DOTS.isdisjoint(segments) or (decoded and "" in segments):
        raise _unclear(path, "a segment in its name that is empty, . or ..")
    return name


def _unclear(path: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the path {path[:200]!r} has {what}, which servers read differently; send the path of the API as it is"
    )


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
    """True for the paths of models' clients: inference, and models, usage, files and batches, which the ASGI app
    serves."""
    return is_inference(path) or path in _CLIENT_PATHS or path.startswith(_CLIENT_FOLDERS)


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
    below it. However it is written: servers and proxies resolve escapes and dots.

    A pattern whose ``*`` covers chat completions is about the paths that are not known here: it leaves the known ones,
    and stored responses, open.
    """
    listed = tuple(patterns)
    forbidden = _matcher(listed)
    known_forbidden = _matcher(each for each in listed if "*" not in each or not _matcher((each,))(CHAT_PATH))

    @lru_cache(maxsize=1024)
    def is_forbidden(path: str) -> bool:
        is_known = path in INFERENCE_PATHS or stored_response_id(path) is not None
        matches = known_forbidden if is_known else forbidden
        path = posixpath.normpath("/" + unquote(path).lstrip("/"))
        while path != "/":
            if matches(path):
                return True
            path = posixpath.dirname(path)
        return False

    return is_forbidden


def _matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    return re.compile("|".join(translate(pattern) for pattern in patterns) or "(?!)").match
