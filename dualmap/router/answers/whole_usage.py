"""The usage of a whole answer of which several instances gave a part each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def usage_of(prompt_tokens: int, tokens: int) -> dict[str, int]:
    """The usage of answers that have so many tokens, as engines write it."""
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + tokens, "completion_tokens": tokens}


def whole_usage(usage: Mapping[str, Any], had_tokens: int, prompt: str, output: str) -> dict[str, Any]:
    """The usage of the whole answer, from that of its last part.

    Args:
        usage: of the last part, as its instance wrote it.
        had_tokens: tokens of the answer that the prompt of the last part ended with.
        prompt: the name of the count of the prompt's tokens.
        output: the name of the count of the answer's tokens.
    """
    whole = {**usage}
    for name, more in ((prompt, -had_tokens), (output, had_tokens)):
        if isinstance(whole.get(name), int):
            whole[name] += more
    details, prompt_tokens = whole.get(f"{prompt}_details"), whole.get(prompt)
    if isinstance(details, dict) and isinstance(prompt_tokens, int):
        cached_tokens = details.get("cached_tokens")
        if isinstance(cached_tokens, int) and cached_tokens > prompt_tokens:
            whole[f"{prompt}_details"] = {**details, "cached_tokens": prompt_tokens}
    return whole
