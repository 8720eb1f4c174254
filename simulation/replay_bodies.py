"""The requests that a replay sends, written shortly before they are due."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Any

import orjson

from dualmap.simulation.prompts import PromptWriter
from dualmap.simulation.traces import Trace, TraceRequest

_AHEAD = 32
"""Bodies kept ready: bursts then cost no more than sending, and a long trace no memory."""


class Endpoint(StrEnum):
    """The endpoint that requests are sent to."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOKEN_IDS = "token-ids"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Endpoint.CHAT else "/v1/completions"


class RequestBodies:
    """The JSON bodies of a trace's requests, in order."""

    def __init__(self, trace: Trace, model: str, endpoint: Endpoint, salt: str) -> None:
        self._unwritten = iter(trace.requests)
        self._ready: deque[bytes] = deque()
        self._writer = PromptWriter(trace.block_tokens, salt)
        self._model = model
        self._endpoint = endpoint

    def take(self) -> bytes:
        """The next request's body. Raises StopIteration after the last one."""
        return self._ready.popleft() if self._ready else self._write(next(self._unwritten))

    def write_one_ahead(self) -> bool:
        """Use a free moment to write one body in advance; False if enough are ready."""
        if len(self._ready) >= _AHEAD:
            return False
        request = next(self._unwritten, None)
        if request is None:
            return False
        self._ready.append(self._write(request))
        return True

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
