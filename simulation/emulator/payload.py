"""Reading inference requests: from JSON to what the engine and the answer need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import xxhash

from simulation.emulator.errors import bad_request, unknown_model
from simulation.tokenizer import TOKEN_BYTES, block_hashes, count_tokens, decode, render_chat


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is read against."""

    model: str
    max_model_len: int
    block_tokens: int
    mean_output_tokens: int
    seed: int
    crash_on: bytes | None = None
    """A prompt that contains this kills the engine."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation that was asked for."""

    prompt_tokens: int
    block_hashes: tuple[int, ...]
    output_tokens: int
    finish_reason: str
    text_seed: int
    stream: bool
    include_usage: bool
    kills_engine: bool
    """The engine dies when it starts on this prompt."""


def read_json(body: bytes) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"Invalid JSON: {error}") from error
    if not isinstance(payload, dict):
        raise bad_request("The request body must be a JSON object.")
    return payload


def read_chat(payload: Mapping[str, Any], limits: Limits) -> Ask:
    """A chat completion request. Raises ApiError."""
    _check_model(payload, limits)
    return _read_ask(payload, chat_prompt(payload), limits, ("max_completion_tokens", "max_tokens"), None)


def read_completion(payload: Mapping[str, Any], limits: Limits) -> Ask:
    """A text completion request. Raises ApiError."""
    _check_model(payload, limits)
    return _read_ask(payload, completion_prompt(payload), limits, ("max_tokens",), 16)


def chat_prompt(payload: Mapping[str, Any]) -> bytes:
    """What the model is shown for ``messages`` and ``tools``. Raises ApiError."""
    messages = payload.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list with at least one message.", "messages")
    try:
        return render_chat(messages, payload.get("tools"))
    except ValueError as error:
        raise bad_request(f"Invalid messages: {error}.", "messages") from error


def completion_prompt(payload: Mapping[str, Any]) -> bytes:
    """``prompt`` as text: a string, a list of token ids, or a list with one of these. Raises ApiError."""
    prompt = payload.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt.encode("utf-8", "surrogatepass")
    if isinstance(prompt, list) and prompt:
        return token_bytes(prompt, "prompt")
    raise bad_request("prompt must be a non-empty string or a non-empty list of token ids; one per request.", "prompt")


def token_bytes(ids: Sequence[object], param: str) -> bytes:
    """Token ids from JSON as text. Raises ApiError."""
    if not all(type(token) is int for token in ids):
        raise bad_request(f"{param} must hold integers.", param)
    try:
        return decode(ids)  # type: ignore[arg-type]
    except ValueError as error:
        raise bad_request(f"Invalid {param}: {error}.", param) from error


def _check_model(payload: Mapping[str, Any], limits: Limits) -> None:
    model = payload.get("model", limits.model)
    if not isinstance(model, str):
        raise bad_request("model must be a string.", "model")
    if model != limits.model:
        raise unknown_model(model)


def _read_ask(
    payload: Mapping[str, Any], prompt: bytes, limits: Limits, limit_names: Sequence[str], default: int | None
) -> Ask:
    prompt_tokens = count_tokens(prompt)
    if prompt_tokens >= limits.max_model_len:
        raise bad_request(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages."
        )
    if payload.get("n", 1) != 1:
        raise bad_request("only n=1 is emulated.", "n")
    room = limits.max_model_len - prompt_tokens
    wanted = _output_limit(payload, limit_names, default)
    if wanted is not None and wanted > room:
        raise bad_request(
            f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum context length is "
            f"{limits.max_model_len} tokens and your request has {prompt_tokens} input tokens.",
            limit_names[0],
        )
    text_seed = xxhash.xxh3_64_intdigest(prompt, limits.seed & 0xFFFFFFFFFFFFFFFF)
    at_least = _integer(payload, "min_tokens", 0, 0)
    drawn = max(at_least, 1, _drawn_length(text_seed, limits.mean_output_tokens))
    options = payload.get("stream_options") or {}
    return Ask(
        prompt_tokens=prompt_tokens,
        block_hashes=block_hashes(
            prompt[: prompt_tokens * TOKEN_BYTES], limits.block_tokens, str(payload.get("cache_salt") or "")
        ),
        output_tokens=wanted if wanted is not None else min(room, drawn),
        finish_reason="stop" if wanted is None and drawn <= room else "length",
        text_seed=text_seed,
        stream=bool(payload.get("stream")),
        include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
        kills_engine=limits.crash_on is not None and limits.crash_on in prompt,
    )


def _output_limit(payload: Mapping[str, Any], names: Sequence[str], default: int | None) -> int | None:
    for name in names:
        if payload.get(name) is not None:
            return _integer(payload, name, 1, 1)
    return default


def _integer(payload: Mapping[str, Any], name: str, default: int, minimum: int) -> int:
    value = payload.get(name)
    if value is None:
        return default
    if type(value) is not int or value < minimum:
        raise bad_request(f"{name} must be an integer of at least {minimum}.", name)
    return value


def _drawn_length(seed: int, mean_tokens: int) -> int:
    """An exponential answer length, drawn from the request itself: the same request gets the same answer."""
    uniform = (xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little")) + 1) / 2**64
    return math.ceil(-mean_tokens * math.log(uniform))
