"""Endpoints about the server, and its tokenizer."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CONTENT_TYPE_LATEST

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import invalid
from dualmap.simulation.emulator.fields import flag, read_json, required
from dualmap.simulation.emulator.generation_request import Limits
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.metrics import render
from dualmap.simulation.emulator.openai_api import (
    chat_prompt,
    check_model,
    completion_prompts,
    token_bytes,
    token_texts,
)
from dualmap.simulation.emulator.routes import Route, Routes, send
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.workload.tokenizer import encode


def configuration_routes(generator: Generator, settings: EmulatorSettings) -> Routes:
    """``/server_info``, which vLLM has in its development mode, with what concerns pulls from peers."""

    def show(_request: HttpRequest, responder: Responder) -> None:
        place = {"type": "p2p", "host": generator.kv_legs.host, "port": generator.kv_legs.port}
        connector = {
            "kv_connector": "OffloadingConnector",
            "kv_load_failure_policy": settings.kv_load_failure_policy,
            "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [place]},
        }
        config = {
            "kv_transfer_config": connector,
            "cache_config": {"block_size": generator.config.block_tokens},
            "parallel_config": {"tensor_parallel_size": 1, "data_parallel_index": 0},
        }
        send(responder, {"vllm_config": config})

    return {"/server_info": {"GET": Route(show)}}


class ServerInfo:
    """Information about one emulated server, all its engines."""

    def __init__(self, generators: Sequence[Generator], limits: Limits, version: str) -> None:
        self._generators = generators
        self._limits = limits
        self._version = version
        self._created = int(time.time())

    def routes(self) -> Routes:
        health = done = Route(lambda _, responder: responder.send(200, b""))
        return {
            "/v1/models": {"GET": Route(self._models)},
            "/tokenize": {"POST": Route(self._tokenize)},
            "/detokenize": {"POST": Route(self._detokenize)},
            "/health": {"GET": health},
            "/ping": {"GET": health, "POST": health},
            "/version": {"GET": Route(lambda _, responder: send(responder, {"version": self._version}))},
            "/load": {"GET": Route(self._load)},
            "/kv_event_sources": {"GET": Route(self._kv_event_sources)},
            "/metrics": {"GET": Route(self._metrics)},
            **self._limits.names.routes(self._load_adapter),
            "/reset_prefix_cache": {"POST": Route(self._reset_prefix_cache)},
            "/reset_mm_cache": {"POST": done},
            "/reset_encoder_cache": {"POST": done},
            "/start_profile": {"POST": done},
            "/stop_profile": {"POST": done},
        }

    def _load_adapter(self, name: str, replaces: bool) -> float:
        return max(generator.load_adapter(name, replaces=replaces) for generator in self._generators)

    def _models(self, _request: HttpRequest, responder: Responder) -> None:
        cards = self._limits.names.cards(self._created, self._limits.max_model_len)
        send(responder, {"object": "list", "data": cards})

    def _kv_event_sources(self, _request: HttpRequest, responder: Responder) -> None:
        logs = [(rank, each.kv_events) for rank, each in enumerate(self._generators)]
        send(responder, {str(rank): log.source for rank, log in logs if log is not None})

    def _load(self, _request: HttpRequest, responder: Responder) -> None:
        send(responder, {"server_load": sum(each.active for each in self._generators)})

    def _metrics(self, _request: HttpRequest, responder: Responder) -> None:
        responder.send(200, render([each.metrics for each in self._generators]), CONTENT_TYPE_LATEST)

    def _tokenize(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        check_model(payload, self._limits)
        prompt = chat_prompt(payload).data if "messages" in payload else completion_prompts(payload)[0]
        ids = encode(prompt)
        answer = {
            "count": len(ids),
            "max_model_len": self._limits.max_model_len,
            "tokens": ids,
            "token_strs": token_texts(prompt) if flag(payload, "return_token_strs") else None,
        }
        send(responder, answer)

    def _detokenize(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        check_model(payload, self._limits)
        tokens = required(payload, "tokens")
        if not isinstance(tokens, list):
            raise invalid("tokens", "list_type", "Input should be a valid list", tokens)
        send(responder, {"prompt": token_bytes(tokens, "tokens").decode("utf-8", "replace")})

    def _reset_prefix_cache(self, _request: HttpRequest, responder: Responder) -> None:
        """Reset the prefix cache. It fails while requests hold blocks, as in vLLM."""
        idle = not any(each.engine.kv_used_tokens for each in self._generators)
        for each in self._generators if idle else ():
            each.engine.clear_cache()
        send(responder, {"success": idle})
