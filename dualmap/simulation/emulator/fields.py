"""Fields of a JSON body, checked as vLLM checks them. A field that is null counts as absent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from dualmap.api_bodies.json_body import UnreadableJsonError
from dualmap.api_bodies.json_body import read_json as read_any_json
from dualmap.api_bodies.lax_values import lax_bool, lax_int
from dualmap.simulation.emulator.errors import bad_request, invalid, missing

Body = Mapping[str, Any]
_KEPT: Final = frozenset({
    "cache_salt", "format", "instructions", "kv_transfer_params", "lora_name", "lora_path", "metadata", "model",
    "output_config", "previous_response_id", "request_id", "response_format", "structured_outputs", "temperature",
    "text", "tool_choice", "tools", "top_p",
})  # fmt: skip
"""Fields that an engine, or an answer, gets as they are. A prompt becomes tokens, which any text of JSON can."""


def read_json(body: bytes) -> dict[str, Any]:
    """The request's JSON object. A field that is kept is refused where no JSON in UTF-8 holds it: it has a lone
    surrogate, or 255 levels. Raises ApiError."""
    try:
        payload = read_any_json(body)
    except UnreadableJsonError as error:
        raise invalid(str(error.position), "json_invalid", f"JSON decode error: {error.reason}", {}) from error
    if not isinstance(payload, dict):
        raise invalid("", "model_attributes_type", "Input should be a valid dictionary", payload)
    for name in payload.keys() & _KEPT:
        try:
            orjson.dumps(payload[name])
        except TypeError as error:
            raise invalid(name, "value_error", f"Value error, {error}", {}) from error
    return payload


def integer(payload: Body, name: str) -> int | None:
    value = payload.get(name)
    whole = lax_int(value)
    if value is None or whole is not None:
        return whole
    raise invalid(name, "int_type", "Input should be a valid integer", value)


def number(payload: Body, name: str) -> float | None:
    value = payload.get(name)
    if value is None or isinstance(value, int | float):
        return value
    try:
        if isinstance(value, str):
            return float(value)
    except ValueError:
        pass
    raise invalid(name, "float_type", "Input should be a valid number", value)


def flag(payload: Body, name: str) -> bool:
    value = payload.get(name)
    given = lax_bool(value)
    if value is None or given is not None:
        return bool(given)
    raise invalid(name, "bool_type", "Input should be a valid boolean", value)


def text(payload: Body, name: str) -> str | None:
    value = payload.get(name)
    if value is None or isinstance(value, str):
        return value
    raise invalid(name, "string_type", "Input should be a valid string", value)


def word(payload: Body, name: str, allowed: Collection[str], within: str = "") -> str | None:
    """A string that must be one of some; ``within``: where the payload itself is in the body."""
    value = payload.get(name)
    if value is None or value in allowed:
        return value
    location = f"{within}.{name}" if within else name
    raise invalid(location, "literal_error", f"Input should be one of {', '.join(map(repr, allowed))}", value)


def texts(payload: Body, name: str) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = payload.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise invalid(name, "string_type", "Input should be a valid string or a list of strings", value)


def objects(payload: Body, name: str) -> Sequence[Mapping[str, Any]] | None:
    """A list of JSON objects."""
    value = payload.get(name)
    if value is None:
        return None
    if not isinstance(value, list):
        raise invalid(name, "list_type", "Input should be a valid list", value)
    for index, each in enumerate(value):
        if not isinstance(each, dict):
            raise invalid(f"{name}.{index}", "dict_type", "Input should be a valid dictionary", each)
    return value


def mapping(payload: Body, name: str) -> Mapping[str, Any] | None:
    """A JSON object."""
    value = payload.get(name)
    if value is None or isinstance(value, dict):
        return value
    raise invalid(name, "dict_type", "Input should be a valid dictionary", value)


def required(payload: Body, name: str) -> Any:
    """Any value of the field, but not null."""
    value = payload.get(name)
    if value is None:
        raise missing(name, payload)
    return value


def whole_number(payload: Body, name: str, default: int) -> int:
    value = payload.get(name, default)
    if type(value) is not int or value < 0:
        raise bad_request(f"{name} must be a whole number.", name)
    return value
