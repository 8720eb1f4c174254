"""The paths that the engine works for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar
from urllib.parse import unquote

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import ApiError
from dualmap.simulation.emulator.faults import Faults, GivenBackError
from dualmap.simulation.emulator.fields import Body, flag, read_json
from dualmap.simulation.emulator.generation_request import GenerationRequest, Limits, Prompt
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.kv_transfer_params import (
    read_kv_transfer_params,
    read_max_load_tokens,
    read_peer_source,
)
from dualmap.simulation.emulator.messages_api import read_count, read_message
from dualmap.simulation.emulator.openai_api import read_chat, read_completion
from dualmap.simulation.emulator.pooling_api import read_embedding, read_rerank, read_score
from dualmap.simulation.emulator.replies import Reply, Stamp, StreamReply
from dualmap.simulation.emulator.responses_api import ResponseReply, StoredResponses, read_response
from dualmap.simulation.emulator.routes import Route, Routes, send
from dualmap.simulation.workload.tokenizer import count_tokens, encode

R = TypeVar("R", bound=Reply)
Read = Callable[[Body, Limits, Stamp], tuple[GenerationRequest, R]]


class Inference:
    """Reads requests, and has the generator answer them."""

    def __init__(
        self, generator: Generator, limits: Limits, faults: Faults, version: str, *, stores: bool = False
    ) -> None:
        """``stores``: responses are kept, to be read again."""
        self._generator = generator
        self._limits = limits
        self._faults = faults
        self._fingerprint = f"vllm-{version}"
        self._stored = StoredResponses(stores=stores)
        self._started = int(time.time())
        self._minted = count(1)

    def routes(self) -> Routes:
        embeddings, rerank, score = self._pooled(read_embedding), self._pooled(read_rerank), self._pooled(read_score)
        messages = self._generated(read_message, error_body=ApiError.anthropic_body)
        return {
            "/v1/chat/completions": {"POST": self._generated(read_chat)},
            "/v1/completions": {"POST": self._generated(read_completion)},
            "/v1/responses": {"POST": self._generated(self._read_response, own_id=True)},
            "/v1/messages": {"POST": messages},
            "/v1/messages/count_tokens": {"POST": Route(self._count_tokens, ApiError.anthropic_body)},
            "/v1/embeddings": {"POST": embeddings},
            **{path: {"POST": rerank} for path in ("/v1/rerank", "/rerank", "/v2/rerank")},
            **{path: {"POST": score} for path in ("/v1/score", "/score")},
        }

    def renders(self) -> dict[str, Route]:
        """The paths that answer with a prompt as the engine would get it."""
        return {
            "/v1/chat/completions/render": self._rendered(read_chat),
            "/v1/completions/render": self._rendered(read_completion, many=True),
            "/v1/messages/render": self._rendered(read_message),
            "/v1/responses/render": self._rendered(read_response),
        }

    def stored_response(self, request: HttpRequest, responder: Responder) -> None:
        """``/v1/responses/ID``, and to cancel it. Raises ApiError."""
        response_id, *below = unquote(request.path).split("/")[3:]  # decoded first, as vLLM's server does it
        cancel = below == ["cancel"]
        if below and not cancel:
            responder.send(404, b'{"detail":"Not Found"}')
        elif request.method != ("POST" if cancel else "GET"):
            responder.send(405, b'{"detail":"Method Not Allowed"}')
        elif cancel:
            self._stored.cancel(response_id)
        else:
            send(responder, self._stored.read(response_id))

    def _read_response(self, payload: Body, limits: Limits, stamp: Stamp) -> tuple[GenerationRequest, ResponseReply]:
        payload = self._stored.continued(payload)
        gen_request, reply = read_response(payload, limits, stamp)
        reply.keep = self._stored.keep_of(payload)
        return gen_request, reply

    def _generated(
        self,
        read: Read[StreamReply],
        *,
        own_id: bool = False,
        error_body: Callable[[ApiError], bytes] = lambda error: error.body(),
    ) -> Route:
        """``own_id``: the answer's id is the server's own, not the client's."""

        def handle(request: HttpRequest, responder: Responder) -> None:
            payload = read_json(request.body)
            self._fail_if_ordered(payload)
            limits, after_tokens = self._limits, self._faults.gives_back_after()
            if after_tokens is not None:
                limits = replace(limits, gives_back_after=after_tokens)
            gen_request, reply = read(payload, limits, self._stamp(request, payload, own_id=own_id))
            gen_request = replace(
                gen_request, max_load_tokens=read_max_load_tokens(payload), peer=read_peer_source(payload)
            )
            stream = reply if flag(payload, "stream") else None
            if (to := self._faults.lie_to(responder, gen_request, stream)) is not None:
                self._generator.start(gen_request, reply, to, stream, known_as=reply.engine_id)

        return Route(handle, error_body)

    def _rendered(self, read: Read[Reply], *, many: bool = False) -> Route:
        """``many``: the answer is a list, of all prompts. Tensors of images (``mm_payload``) are never given."""

        def handle(request: HttpRequest, responder: Responder) -> None:
            payload = read_json(request.body)
            stamp = self._stamp(request, payload)
            gen_request, _ = read(payload, self._limits, stamp)
            prompts = [choice.prompt for choice in gen_request.choices if choice.first_of_prompt]
            shown: list[dict[str, Any]] = [
                {
                    "request_id": stamp.request_id,
                    "token_ids": encode(prompt.text),
                    "features": _features(prompt),
                    "model": stamp.model,
                    "stream": flag(payload, "stream"),
                    "cache_salt": prompt.scope.salt or None,
                }
                for prompt in prompts
            ]
            send(responder, shown if many else shown[0])

        return Route(handle)

    def _fail_if_ordered(self, payload: dict[str, Any]) -> None:
        try:
            self._faults.fail_if_ordered()
        except GivenBackError:
            self._generator.kv_legs.take(read_kv_transfer_params(payload, ""))  # such a decoder had the KV
            raise

    def _pooled(self, read: Read[Reply]) -> Route:
        def handle(request: HttpRequest, responder: Responder) -> None:
            self._faults.fail_if_ordered()
            payload = read_json(request.body)
            gen_request, reply = read(payload, self._limits, self._stamp(request, payload))
            if (to := self._faults.lie_to(responder, gen_request)) is not None:
                self._generator.start(gen_request, reply, to)

        return Route(handle)

    def _count_tokens(self, request: HttpRequest, responder: Responder) -> None:
        tokens = count_tokens(read_count(read_json(request.body), self._limits).data)
        send(responder, {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})

    def _stamp(self, request: HttpRequest, payload: dict[str, Any], *, own_id: bool = False) -> Stamp:
        given = None if own_id else request.headers.get("x-request-id")
        request_id = given or payload.get("request_id") or f"{self._started:x}{next(self._minted):08x}"
        adapter = self._limits.names.adapter_of(payload)
        answering = self._limits.model if adapter is None else adapter.name
        return Stamp(str(request_id), answering, int(time.time()), self._fingerprint)


def _features(prompt: Prompt) -> dict[str, Any] | None:
    """The images of a prompt, and their places in it."""
    if not prompt.images:
        return None
    places = [{"offset": each.offset, "length": each.length} for each in prompt.images]
    return {
        "mm_hashes": {"image": [each.identifier for each in prompt.images]},
        "mm_placeholders": {"image": places},
        "kwargs_data": None,
        "mm_metadata": None,
    }
