"""Errors as vLLM answers them."""

from __future__ import annotations

from http import HTTPStatus

import orjson


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param

    def body(self) -> bytes:
        """The JSON that vLLM sends, also as an event in a stream that has begun."""
        return orjson.dumps(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}
        )


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


def unknown_model(model: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def queue_full(limit: int) -> ApiError:
    return ApiError(503, "ServiceUnavailableError", f"The waiting queue is full ({limit} requests); try again later.")


def engine_dead() -> ApiError:
    return ApiError(500, "InternalServerError", "EngineCore encountered an issue: the engine is dead.")


def plain(status: int) -> ApiError:
    """An error that has nothing to say but its status."""
    return ApiError(status, HTTPStatus(status).phrase.replace(" ", "") + "Error", HTTPStatus(status).phrase)
