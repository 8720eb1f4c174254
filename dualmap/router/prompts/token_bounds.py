"""The tokens that a request asks for: bounds on what its instance may compute, as far as its body tells them.

Each API names the limit of an answer in its own field, and an engine reads no other one: a client that writes a small
limit into another API's field has set none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dualmap.api_bodies.lax_values import lax_int
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MESSAGES_PATH,
    RESPONSES_PATH,
    SCHEDULED_PATHS,
    SentPrompt,
    TokenBounds,
)
from dualmap.router.prompts.known_bodies import ContinuedChat
from dualmap.router.prompts.prompt import ReadPrompt, count_in, output_limit
from dualmap.scheduling.prompts.blocks import ContinuedText, TextPrompt

BATCH_PATH: Final = "/v1/chat/completions/batch"
GENERATE_PATH: Final = "/inference/v1/generate"
INVOCATIONS_PATH: Final = "/invocations"
SCORING_PATH: Final = "/generative_scoring"
COMPUTES_NOTHING: Final = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        *(f"{path}/render" for path in (CHAT_PATH, COMPLETIONS_PATH, MESSAGES_PATH, RESPONSES_PATH)),
        *(f"{path}/derender" for path in (CHAT_PATH, COMPLETIONS_PATH)),
    }
)
"""Paths whose answers take no tokens of a model."""
MOST_TOKENS: Final = 2**52
"""More than any limit: a request that asks for more asks for this."""


def passed_on_tokens(path: str, body: Mapping[str, Any], body_bytes: int) -> TokenBounds | None:
    """The tokens that a body of so many bytes asks for, of a request that is passed on; None: none."""
    if path in COMPUTES_NOTHING:
        return None
    if path == BATCH_PATH:
        listed = body.get("messages")
        conversations = len(listed) if isinstance(listed, list) else 1
        return TokenBounds(body_bytes, output_limit(CHAT_PATH, body), max(1, conversations) * _answers(body))
    if path == GENERATE_PATH:
        sampling = body.get("sampling_params")
        sampling = sampling if isinstance(sampling, dict) else {}
        return TokenBounds(body_bytes, count_in(sampling, "max_tokens"), _answers(sampling))
    if path == SCORING_PATH:
        listed = body.get("items")
        items = max(1, len(listed)) if isinstance(listed, list) else 1
        return TokenBounds(body_bytes * items, 1, items)  # the query is computed with each item
    if path == INVOCATIONS_PATH:
        return _invoked(body, body_bytes)
    limit = output_limit(path, body) if path in SCHEDULED_PATHS else None
    return TokenBounds(body_bytes, limit, _answers(body))


def unread_tokens(path: str, body_bytes: int, *, form: bool = False) -> TokenBounds | None:
    """The tokens that a body asks for of which nothing was read; those of a form have no measure in bytes."""
    if path in COMPUTES_NOTHING or not body_bytes:
        return None
    return TokenBounds(0 if form else body_bytes, None)


def _invoked(body: Mapping[str, Any], body_bytes: int) -> TokenBounds:
    """A body that may be of any API: the engine takes it for one that it fits."""
    names = (("messages", CHAT_PATH), ("prompt", COMPLETIONS_PATH), ("prompt_embeds", COMPLETIONS_PATH))
    paths = [path for name, path in names if name in body]
    limits = [output_limit(path, body) for path in paths]
    unlimited = not all(limits)
    limit = None if unlimited else max((each or 0 for each in limits), default=1)
    return TokenBounds(body_bytes, limit, completed_prompts(body) * _answers(body))


def completed_prompts(body: Mapping[str, Any]) -> int:
    """The number of prompts that a body for completions has, those given as embeddings among them; 1 where that cannot
    be read."""
    prompt, embeds = body.get("prompt"), body.get("prompt_embeds")
    texts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else int(bool(prompt))
    return max(1, texts + (len(embeds) if isinstance(embeds, list) else int(bool(embeds))))


def prompt_bound(sent: SentPrompt, read: ReadPrompt) -> int:
    """The most tokens that the prompt of a scheduled request may have: those that were counted, else its bytes. What a
    template adds beyond the text of messages, and media, are estimated."""
    if read.count is None and isinstance(sent.prompt, TextPrompt | ContinuedText | ContinuedChat):
        return max(read.tokens, read.stored_tokens + sent.prompt.size)
    return read.tokens


def answer_bound(limit: int | None, answers: int, context_tokens: int | None) -> int | None:
    """The most tokens of so many answers with this limit, or none (None, 0), in a context of so many tokens; None where
    neither is known."""
    if context_tokens is not None:
        limit = min(limit, context_tokens) if limit else context_tokens
    return min(MOST_TOKENS, limit * answers) if limit else None


def _answers(body: Mapping[str, Any]) -> int:
    return min(MOST_TOKENS, max(1, lax_int(body.get("n")) or 1))
