"""The prompts of requests that are pooled rather than answered: embeddings, rerank, score, classification.

They are scheduled by load: what counts is how many tokens they are. One request may have thousands of short prompts,
which share nothing worth finding again, so all of them are rendered as one text, in which only their length matters.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, Final

from dualmap.api_bodies.errors import TooManyPartsError
from dualmap.api_bodies.prompt import MAX_PARTS, LongTexts
from dualmap.scheduling.prompts.blocks import Prompt, TextPrompt, TokenPrompt

_FIELDS: Final = (
    "input", "inputs", "texts", "prompt", "query", "documents", "queries", "text_1", "text_2", "data_1", "data_2",
)  # fmt: skip
_SEPARATOR: Final = b"\xff"
_MAX_REPEATED_BYTES: Final = 1 << 20
_NO_LONG_TEXTS: Final[LongTexts] = {}


def pooled_prompt(
    body: Mapping[str, Any], long_texts: LongTexts = _NO_LONG_TEXTS, *, max_parts: int = MAX_PARTS
) -> Prompt | None:
    """The prompts of a body as one; None for a body in which none is found.

    A query is computed with each of its documents, so it counts as often, as far as that is not out of all proportion.

    Raises:
        TooManyPartsError: there are too many prompts.
    """
    ids = body.get("input")
    if isinstance(ids, list) and ids and isinstance(ids[0], int | list):
        return _token_ids(ids, max_parts)
    texts: list[bytes] = []
    for name in _FIELDS:
        _collect(body.get(name), name, long_texts, texts, max_parts)
    messages = body.get("messages")
    if isinstance(messages, list):
        for message in messages:
            _collect(
                message.get("content") if isinstance(message, dict) else None, "messages", long_texts, texts, max_parts
            )
    if not texts:
        return None
    repeated = texts[0] * (len(texts) - 2) if "query" in body or "text_1" in body else b""
    return TextPrompt(_SEPARATOR.join(texts) + repeated[:_MAX_REPEATED_BYTES])


def _token_ids(ids: list[Any], max_parts: int) -> TokenPrompt | None:
    if isinstance(ids[0], list) and len(ids) > max_parts:
        raise TooManyPartsError(f"input has over {max_parts} entries", "input")
    try:
        return TokenPrompt(array("I", ids if isinstance(ids[0], int) else [each for some in ids for each in some]))
    except (TypeError, OverflowError):
        return None


def _collect(value: Any, name: str, long_texts: LongTexts, texts: list[bytes], max_parts: int) -> None:
    if isinstance(value, str):
        long = long_texts.get(value)
        texts.append(value.encode("utf-8", "surrogatepass") if long is None else long)
    elif isinstance(value, list):
        if len(value) > max_parts:
            raise TooManyPartsError(f"{name} has over {max_parts} entries", name)
        for each in value:
            _collect(each.get("text") if isinstance(each, dict) else each, name, long_texts, texts, max_parts)
    elif isinstance(value, dict):
        _collect(value.get("content"), name, long_texts, texts, max_parts)
