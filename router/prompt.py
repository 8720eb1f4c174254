"""From a request body to what the scheduler needs of it: chain, expected output, bytes to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from router.errors import InvalidRequestError
from router.inference_request import InferenceRequest, read_count
from scheduling.blocks import BlockRule, TextPrompt, cache_seed
from scheduling.chain import Chain
from scheduling.errors import PromptError
from scheduling.prompt import chat_prompt, completion_prompt
from scheduling.values import value

_TRUNCATION: Final = "truncate_prompt_tokens"
"""vLLM's parameter that lets the engine see the end of a prompt only."""


@value
class ReadPrompt:
    chain: Chain
    text_bytes: int | None
    """Length of the rendered text; None for token ids, for prompts with media, and for those that the engine is to
    truncate, which teach nothing about bytes per token."""
    expected_output_tokens: int
    """Enters the shared load: the configured expectation, or the request's limit where that is less. A limit is no
    forecast: most clients name one that few of their answers reach, and instances whose running requests were counted
    by it would look full all the time. The instance gets the limit as it was sent."""


def read_prompt(
    request: InferenceRequest,
    *,
    model: str,
    lora: str | None,
    rule: BlockRule,
    bytes_per_token: float,
    expected_output_tokens: int,
) -> ReadPrompt:
    """Render and hash the prompt of a scheduled request.

    Raises:
        InvalidRequestError: the body has no prompt, or parts of it have the wrong type.
    """
    body = request.body
    try:
        prompt = chat_prompt(body) if request.path.endswith("/chat/completions") else completion_prompt(body)
    except PromptError as error:
        raise InvalidRequestError(str(error), param=error.param) from error
    salt = _cache_salt(body)
    seed = _unsalted_seed(model, lora) if salt is None else cache_seed(model, lora, salt)
    chain = rule.chain(prompt, seed, bytes_per_token)
    text_bytes = None
    if isinstance(prompt, TextPrompt) and not prompt.has_media and body.get(_TRUNCATION) is None:
        text_bytes = len(prompt.data)
    return ReadPrompt(chain, text_bytes, min(_output_limit(body) or expected_output_tokens, expected_output_tokens))


@lru_cache(maxsize=1024)
def _unsalted_seed(model: str, lora: str | None) -> int:
    """The same for almost all requests of a model."""
    return cache_seed(model, lora)


def _cache_salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequestError("'cache_salt' must be a string", param="cache_salt")
    return salt


def _output_limit(body: Mapping[str, Any]) -> int | None:
    for param in ("max_completion_tokens", "max_tokens"):
        limit = read_count(body, param)
        if limit is not None:
            return limit
    return None
