"""What an answer, or an event of one, says in the fields of its API, each read at its place.

An engine repeats parts of a request in its answer (``/v1/responses``: tools, the format of the text, metadata), and a
client can write any text into those. So nothing here searches bytes: a field counts where its API puts it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from dualmap.scheduling.request.outcome import Usage

MOST_TOKENS: Final = 2**31 - 1
"""The largest count that is taken over from a usage."""
GIVEN_BACK_REASON: Final = "recomputed"
"""The stop reason by which a decoder of vLLM-Ascend gives a request back. A client's stop string can be the same."""
_OF_CACHES: Final = frozenset(
    {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens", "cache_creation_input_tokens"}
)


def is_aborted(value: Mapping[str, Any]) -> bool:
    """Whether an answer, or an event of one, says that its instance aborted it.

    Chats and completions have a finish reason for that. A message has none: it ends without a ``stop_reason``. A
    response has a status, which some releases of vLLM set to ``completed`` even so; those cannot be told apart.
    """
    choices = value.get("choices")
    if isinstance(choices, list):
        return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)
    kind = value.get("type")
    if kind == "message":
        return value.get("stop_reason") is None
    if kind == "message_delta":
        delta = value.get("delta")
        return isinstance(delta, dict) and delta.get("stop_reason", "") is None
    return response_of(value).get("status") == "cancelled"


def is_given_back(value: Mapping[str, Any]) -> bool:
    """Whether a decoder of vLLM-Ascend requests to prefill the prompt again, in an event or a whole answer."""
    choices = value.get("choices")
    if not isinstance(choices, list):
        return False
    return any(isinstance(choice, dict) and choice.get("stop_reason") == GIVEN_BACK_REASON for choice in choices)


def response_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The response that an event carries, or that the whole answer is; empty for anything else."""
    response = value.get("response")
    if isinstance(response, dict):
        return response
    return value if value.get("object") == "response" else {}


def usage_of_answer(value: Mapping[str, Any]) -> Usage | None:
    """The usage of an answer, or of an event of one, as its instance counted it; None where it has none."""
    usage = value.get("usage")
    if isinstance(usage, dict):
        return read_usage(usage)
    for holder in (value.get("response"), value.get("message")):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            return read_usage(usage)
    return None


def read_usage(usage: Mapping[str, Any]) -> Usage | None:
    """The counts of a usage of any API; None where it has those of neither prompt nor answer.

    Anthropic's does not count among its ``input_tokens`` what it names ``cache_…_input_tokens``.
    """
    field = usage.get
    prompt, output = _count(field("prompt_tokens")), _count(field("completion_tokens"))
    if prompt is None:
        prompt = _count(field("input_tokens"))
    if output is None:
        output = _count(field("output_tokens"))
    cached = None
    if not _OF_CACHES.isdisjoint(usage):
        cached = _cached(field("prompt_tokens_details"))
        if cached is None:
            cached = _cached(field("input_tokens_details"))
        read, created = _count(field("cache_read_input_tokens")), _count(field("cache_creation_input_tokens"))
        if prompt is not None and (read is not None or created is not None):
            prompt = min(MOST_TOKENS, prompt + (read or 0) + (created or 0))
        if cached is None:
            cached = read
    return None if prompt is None and output is None else Usage(prompt, cached, output)


def _cached(details: object) -> int | None:
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _count(number: object) -> int | None:
    """The count that a field has; None where it has none. Integers beyond 64 bits are floats to the parser."""
    if type(number) is int:
        if 0 <= number <= MOST_TOKENS:
            return number
        return MOST_TOKENS if number > 0 else None
    if type(number) is float and number >= MOST_TOKENS:
        return None if math.isnan(number) else MOST_TOKENS
    return None
