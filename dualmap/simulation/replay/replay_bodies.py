"""The requests that a replay sends, written shortly before they are due."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import orjson

from dualmap.simulation.workload.prompts import PromptWriter
from dualmap.simulation.workload.traces import Trace, TraceRequest


class Endpoint(StrEnum):
    """The endpoint that requests are sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKEN_IDS = "token-ids"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class RequestBodies:
    """The JSON bodies of a trace's requests."""

    def __init__(self, trace: Trace, model: str, endpoint: Endpoint, salt: str) -> None:
        self._requests = trace.requests
        self._ready: dict[int, bytes] = {}
        self._writer = PromptWriter(trace.block_tokens, salt)
        self._model = model
        self._endpoint = endpoint

    @property
    def ready(self) -> int:
        """The number of bodies that were written ahead and not taken."""
        return len(self._ready)

    def take(self, place: int) -> bytes:
        """The body of the request at this place of the trace."""
        return self._ready.pop(place, None) or self._write(self._requests[place])

    def write_ahead(self, place: int) -> None:
        """Use a free moment to write a body before it is taken."""
        self._ready[place] = self._write(self._requests[place])

    def _write(self, request: TraceRequest) -> bytes:
        prompt: dict[str, Any]
        if self._endpoint is Endpoint.CHAT:
            prompt = {"messages": [{"role": "user", "content": self._writer.message(request)}]}
        elif self._endpoint is Endpoint.COMPLETIONS:
            prompt = {"prompt": self._writer.text(request)}
        else:
            prompt = {"prompt": self._writer.token_ids(request)}
        return orjson.dumps(
            {
                "model": self._model,
                **prompt,
                "max_tokens": max(1, request.output_tokens),  # servers refuse 0
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
