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

    def anthropic_body(self) -> bytes:
        """The JSON under ``/v1/messages``. What fails validation is refused before, in the other form, as vLLM does."""
        if self.kind == _VALIDATION:
            return self.body()
        return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})


_VALIDATION = "Bad Request"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """The error for a value that a request may not have; ``param`` is named at the message's end, as vLLM does."""
    return ApiError(400, "BadRequestError", f"{message} (parameter={param})" if param else message, param)


def invalid(location: str, kind: str, message: str, value: object) -> ApiError:
    """A field that fails validation; ``location`` is its path in the body, empty for the body itself."""
    location = f"body.{location}" if location else "body"
    error = {"type": kind, "loc": location, "msg": message, "input": _shown(value)}
    return ApiError(400, _VALIDATION, f"1 validation error:\n  {error}", location)


def missing(location: str, parent: object) -> ApiError:
    return invalid(location, "missing", "Field required", parent)


def not_emulated(name: str) -> ApiError:
    """A feature of vLLM that the emulator lacks: it is refused, not ignored."""
    return ApiError(400, "BadRequestError", f"{name} is not emulated.", name)


def unknown_model(model: str, served: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"The model `{model}` does not exist. Valid aliases: {served}.", "model")


def unknown_response(response_id: str) -> ApiError:
    return ApiError(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


def kv_load_failed(why: str) -> ApiError:
    return ApiError(500, "InternalServerError", f"KV load failure: {why}.")


def queue_full(limit: int) -> ApiError:
    return ApiError(503, "ServiceUnavailableError", f"The waiting queue is full ({limit} requests); try again later.")


def engine_dead() -> ApiError:
    return ApiError(
        500,
        "InternalServerError",
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    )


def plain(status: int) -> ApiError:
    """An error that has only a status."""
    return ApiError(status, HTTPStatus(status).phrase.replace(" ", "") + "Error", HTTPStatus(status).phrase)


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)
