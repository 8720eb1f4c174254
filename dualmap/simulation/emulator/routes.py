"""Paths and their handlers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import ApiError

ErrorBody = Callable[[ApiError], bytes]


def error_body(error: ApiError) -> bytes:
    return error.body()


@dataclass(frozen=True, slots=True)
class Route:
    """The handler of a path and method, which answers now or later."""

    handler: Callable[[HttpRequest, Responder], None]
    """May raise ApiError."""
    error_body: ErrorBody = error_body
    """How its API formats errors."""


Routes = Mapping[str, Mapping[str, Route]]
"""Routes by path and method."""


def send(responder: Responder, answer: dict[str, Any] | list[dict[str, Any]]) -> None:
    responder.send(200, orjson.dumps(answer))
