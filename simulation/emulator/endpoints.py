"""The emulated server's paths: vLLM's own, and switches for faults under ``/emulator/``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_LATEST

from simulation.emulator.connection import HttpRequest, Responder
from simulation.emulator.errors import ApiError, bad_request, engine_dead, plain
from simulation.emulator.generator import Generator
from simulation.emulator.payload import (
    Limits,
    chat_prompt,
    completion_prompt,
    read_chat,
    read_completion,
    read_json,
    token_bytes,
)
from simulation.emulator.replies import Reply
from simulation.settings import EmulatorSettings
from simulation.tokenizer import encode

VERSION = "0.32.0+emulated"


@dataclass(slots=True)
class Faults:
    """What has been ordered to go wrong."""

    fail_next: int = 0
    fail_status: int = 500
    draining: bool = False
    """Shutting down: new requests get 500, running ones go on."""


class Endpoints:
    """Answers the requests of one emulated server.

    Args:
        die: close the port, at once or with the error events of a dying engine, and open it again after a time
            (None: never).
    """

    def __init__(
        self, settings: EmulatorSettings, generator: Generator, die: Callable[[bool, float | None], None]
    ) -> None:
        self.faults = Faults()
        self._generator = generator
        self._die = die
        self._model = settings.served_model
        self._limits = Limits(
            model=self._model,
            max_model_len=generator.config.max_request_tokens,
            block_tokens=generator.config.block_tokens,
            mean_output_tokens=settings.mean_output_tokens,
            seed=settings.seed,
            crash_on=settings.crash_on.encode() if settings.crash_on is not None else None,
        )
        self._created = int(time.time())
        self._minted = count(1)
        self._routes: dict[str, dict[str, Callable[[HttpRequest, Responder], None]]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/version": {"GET": lambda _request, responder: _send(responder, {"version": VERSION})},
            "/load": {"GET": lambda _request, responder: _send(responder, {"server_load": generator.active})},
            "/metrics": {"GET": self._metrics},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/emulator/statistics": {"GET": self._statistics},
            "/emulator/pause": {"POST": lambda _request, responder: self._switch(responder, generator.pause)},
            "/emulator/resume": {"POST": lambda _request, responder: self._switch(responder, generator.resume)},
            "/emulator/fail": {"POST": self._fail},
            "/emulator/die": {"POST": self._order_death},
        }

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer, now or later; every ApiError becomes its JSON."""
        try:
            methods = self._routes.get(request.path)
            if methods is None:
                raise plain(404)
            method = "GET" if request.method == "HEAD" else request.method
            if method not in methods:
                raise plain(405)
            methods[method](request, responder)
        except ApiError as error:
            responder.send(error.status, error.body())

    # inference ----------------------------------------------------------------------------------------------
    def _chat(self, request: HttpRequest, responder: Responder) -> None:
        self._fail_if_ordered()
        ask = read_chat(read_json(request.body), self._limits)
        self._generator.start(ask, self._reply(request, chat=True), responder)

    def _completion(self, request: HttpRequest, responder: Responder) -> None:
        self._fail_if_ordered()
        ask = read_completion(read_json(request.body), self._limits)
        self._generator.start(ask, self._reply(request, chat=False), responder)

    def _reply(self, request: HttpRequest, *, chat: bool) -> Reply:
        request_id = request.headers.get("x-request-id") or f"{self._created:x}{next(self._minted):08x}"
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        return Reply(chat=chat, answer_id=answer_id, model=self._model, created=int(time.time()))

    def _fail_if_ordered(self) -> None:
        if self.faults.draining:
            raise engine_dead()
        if self.faults.fail_next > 0:
            self.faults.fail_next -= 1
            raise plain(self.faults.fail_status)

    # about the server ---------------------------------------------------------------------------------------
    def _models(self, _request: HttpRequest, responder: Responder) -> None:
        model = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._model,
            "parent": None,
            "max_model_len": self._limits.max_model_len,
        }
        _send(responder, {"object": "list", "data": [model]})

    def _health(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, b"")

    def _metrics(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, self._generator.metrics.render(), CONTENT_TYPE_LATEST)

    def _tokenize(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        ids = encode(chat_prompt(payload) if "messages" in payload else completion_prompt(payload))
        answer = {"count": len(ids), "max_model_len": self._limits.max_model_len, "tokens": ids, "token_strs": None}
        _send(responder, answer)

    def _detokenize(self, request: HttpRequest, responder: Responder) -> None:
        tokens = read_json(request.body).get("tokens")
        if not isinstance(tokens, list):
            raise bad_request("tokens must be a list of token ids.", "tokens")
        _send(responder, {"prompt": token_bytes(tokens, "tokens").decode("utf-8", "replace")})

    def _reset_prefix_cache(self, _request: HttpRequest, responder: Responder) -> None:
        self._generator.engine.clear_cache()
        responder.send(200, b"")

    # faults -------------------------------------------------------------------------------------------------
    def _statistics(self, _request: HttpRequest, responder: Responder) -> None:
        _send(responder, asdict(self._generator.engine.statistics()))

    def _switch(self, responder: Responder, switch: Callable[[], None]) -> None:
        switch()
        _send(responder, {"paused": self._generator.clock.paused})

    def _fail(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body or b"{}")
        self.faults.fail_next = _number(payload, "count", 1)
        self.faults.fail_status = _number(payload, "status", 500)
        if not 400 <= self.faults.fail_status <= 599:
            raise bad_request("status must be an error status.", "status")
        _send(responder, {"fail_next": self.faults.fail_next})

    def _order_death(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body or b"{}")
        revive = payload.get("revive_after_s")
        if revive is not None and not (type(revive) in (int, float) and revive >= 0):
            raise bad_request("revive_after_s must be a number of seconds.", "revive_after_s")
        _send(responder, {"dying": True})
        self._die(bool(payload.get("abruptly")), revive)


def _number(payload: dict[str, Any], name: str, default: int) -> int:
    value = payload.get(name, default)
    if type(value) is not int or value < 0:
        raise bad_request(f"{name} must be a whole number.", name)
    return value


def _send(responder: Responder, answer: dict[str, Any]) -> None:
    responder.send(200, orjson.dumps(answer))
