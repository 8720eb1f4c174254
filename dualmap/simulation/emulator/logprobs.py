"""Log-probabilities of made-up tokens: made up too, and the same for the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from dualmap.simulation.emulator.errors import ApiError, bad_request
from dualmap.simulation.emulator.fields import Body, flag, integer
from dualmap.simulation.workload.prompts import WORDS

MAX_LOGPROBS = 20


def read_chat_logprobs(payload: Body) -> int | None:
    """How many alternatives to each token a chat wants; None: no log-probabilities at all. Raises ApiError."""
    wanted = flag(payload, "logprobs")
    top = integer(payload, "top_logprobs")
    if top is not None and not wanted and top != 0:
        raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    _check_number(top, "top_logprobs")
    return (top or 0) if wanted else None


def read_completion_logprobs(payload: Body) -> int | None:
    """The alternatives that a completion requests. Raises ApiError."""
    wanted = integer(payload, "logprobs")
    _check_number(wanted, "logprobs")
    return wanted


def chat_logprobs(tokens: Sequence[str], top: int) -> dict[str, Any]:
    def entry(token: str, logprob: float) -> dict[str, Any]:
        return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}

    return {
        "content": [
            {
                **entry(token, _logprob(token)),
                "top_logprobs": [entry(other, logprob) for other, logprob in _alternatives(token, top)],
            }
            for token in tokens
        ]
    }


def completion_logprobs(tokens: Sequence[str], top: int, first_offset: int, *, has_start: bool) -> dict[str, Any]:
    """``has_start``: the first token is the prompt's first, which nothing predicts."""
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    known: list[float | None] = [_logprob(token) for token in tokens]
    alternatives: list[dict[str, float] | None] = [dict(_alternatives(token, max(1, top))) for token in tokens]
    if has_start and tokens:
        known[0] = alternatives[0] = None
    return {
        "text_offset": offsets,
        "token_logprobs": known,
        "tokens": list(tokens),
        "top_logprobs": alternatives,
    }


def _check_number(wanted: int | None, name: str) -> None:
    if wanted is None:
        return
    if wanted < -1:
        raise ApiError(
            400,
            "BadRequestError",
            f"`{name}` must be a positive value or -1. (parameter={name}, value={wanted})",
            name,
        )
    if wanted > MAX_LOGPROBS or wanted == -1:  # -1: the whole vocabulary
        number = len(WORDS) if wanted == -1 else wanted
        raise ApiError(
            400,
            "BadRequestError",
            f"Requested sample logprobs of {number}, which is greater than max allowed: {MAX_LOGPROBS} "
            f"(parameter=logprobs, value={wanted})",
            "logprobs",
        )


def _logprob(token: str) -> float:
    return -(_hash(token) % 2000 + 1) / 1000


def _alternatives(token: str, count: int) -> list[tuple[str, float]]:
    """The token itself, and the next most likely ones."""
    best = _logprob(token)
    first = _hash(token) >> 16
    words = (WORDS[(first + at) % len(WORDS)].decode("ascii") for at in range(count + 1))
    others = [word for word in words if word != token]
    return [(token, best), *((other, best - 0.5 * at) for at, other in enumerate(others, 1))][:count]


def _hash(token: str) -> int:
    return xxhash.xxh3_64_intdigest(token.encode("utf-8", "surrogatepass"))
