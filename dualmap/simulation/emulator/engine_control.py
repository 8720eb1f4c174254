"""vLLM's endpoints that control an engine: pause and sleep, and the end of single requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import ApiError, bad_request, invalid, not_emulated
from dualmap.simulation.emulator.fields import read_json
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.routes import Route, Routes, send

_UNKNOWN_SCALE_OUT_PATHS = (
    "/inference/v1/generate",
    "/v1/chat/completions/derender",
    "/v1/completions/derender",
)
_ABORT_PATH = "/inference/v1/abort_requests"
_DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


class EngineControl:
    """The state of one server's scheduler, and the orders to it.

    Args:
        generators: of all its engines.
        renders: the routes that render prompts, which are endpoints of ``--enable-scale-out``, too.
        scale_out: whether it has these endpoints.
    """

    def __init__(self, generators: Sequence[Generator], renders: Mapping[str, Route], *, scale_out: bool) -> None:
        self._generators = generators
        self._renders = renders
        self._scale_out = scale_out

    def routes(self) -> Routes:
        unknown = dict.fromkeys(_UNKNOWN_SCALE_OUT_PATHS, Route(self._not_emulated))
        scale_out = {**unknown, **self._renders, _ABORT_PATH: Route(self._abort)}
        if not self._scale_out:
            scale_out = dict.fromkeys(scale_out, Route(_refuse))
        return {
            **{path: {"POST": route} for path, route in scale_out.items()},
            "/pause": {"POST": Route(self._pause)},
            "/resume": {"POST": Route(self._resume)},
            "/is_paused": {"GET": Route(self._tells("is_paused"))},
            "/sleep": {"POST": Route(self._sleep)},
            "/wake_up": {"POST": Route(self._wake_up)},
            "/is_sleeping": {"GET": Route(self._tells("is_sleeping"))},
            "/abort_requests": {"POST": Route(self._abort_some_or_all)},
        }

    @property
    def is_paused(self) -> bool:
        """A paused engine counts as a sleeping one, and a sleeping one as paused."""
        return all(each.holds_back for each in self._generators)

    def _pause(self, request: HttpRequest, responder: Responder) -> None:
        mode, clears = _mode(request), _word(request, "clear_cache", "true").lower() in ("true", "1", "yes", "on")
        self._hold_back(mode, clears_cache=clears)
        send(responder, {"status": "paused"})

    def _sleep(self, request: HttpRequest, responder: Responder) -> None:
        level = _word(request, "level", "1")
        if level not in ("0", "1", "2"):
            raise invalid("level", "less_than_equal", "Input should be less than or equal to 2", level)
        self._hold_back(_mode(request), clears_cache=level != "0")
        send(responder, {"status": "sleeping", "level": int(level)})

    def _hold_back(self, mode: str, *, clears_cache: bool) -> None:
        for each in self._generators:
            each.hold_back(aborts=mode == "abort", clears_cache=clears_cache)

    def _resume(self, _request: HttpRequest, responder: Responder) -> None:
        self._go_on()
        send(responder, {"status": "resumed"})

    def _wake_up(self, request: HttpRequest, responder: Responder) -> None:
        self._go_on()
        send(responder, {"status": "awake", "tags": parse_qs(request.query).get("tags")})

    def _go_on(self) -> None:
        for each in self._generators:
            each.go_on()

    def _tells(self, name: str) -> Callable[[HttpRequest, Responder], None]:
        return lambda _, responder: send(responder, {name: self.is_paused})

    def _abort(self, request: HttpRequest, responder: Responder) -> None:
        ids = read_json(request.body).get("request_ids")
        if ids is None:
            raise bad_request("Missing 'request_ids' in request body", "request_ids")
        self._end(ids)
        responder.send(200, b"")

    def _abort_some_or_all(self, request: HttpRequest, responder: Responder) -> None:
        ids = read_json(request.body or b"{}").get("request_ids")
        if ids:
            self._end(ids)
            count = len(ids)
        else:
            count = sum(each.abort_all() for each in self._generators)
        send(responder, {"status": "aborted", "aborted": count})

    def _end(self, ids: Any) -> None:
        named = frozenset([ids] if isinstance(ids, str) else map(str, ids))
        for each in self._generators:
            each.abort_named(named)

    def _not_emulated(self, request: HttpRequest, _responder: Responder) -> None:
        raise not_emulated(request.path)


def _refuse(_request: HttpRequest, _responder: Responder) -> None:
    raise ApiError(403, "PermissionDeniedError", _DISABLED)


def _mode(request: HttpRequest) -> str:
    mode = _word(request, "mode", "abort")
    if mode == "wait":
        raise not_emulated("mode=wait")
    if mode not in ("abort", "keep"):
        raise invalid("mode", "literal_error", "Input should be 'abort', 'wait' or 'keep'", mode)
    return mode


def _word(request: HttpRequest, name: str, default: str) -> str:
    return parse_qs(request.query).get(name, [default])[-1]
