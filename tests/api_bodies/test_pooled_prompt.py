from __future__ import annotations

from typing import Any

import pytest

from dualmap.api_bodies.errors import TooManyPartsError
from dualmap.api_bodies.pooled_prompt import pooled_prompt
from dualmap.scheduling.prompts.blocks import TextPrompt, TokenPrompt


def text_bytes(body: dict[str, Any]) -> int:
    prompt = pooled_prompt(body)
    assert isinstance(prompt, TextPrompt)
    return len(prompt.data)


def test_all_texts_count() -> None:
    assert text_bytes({"input": "abcd"}) == 4
    assert text_bytes({"input": ["abcd", "ef"]}) == 7
    assert text_bytes({"messages": [{"role": "user", "content": [{"type": "text", "text": "abcd"}]}]}) == 4
    assert text_bytes({"text_1": "ab", "text_2": ["cd", "ef"]}) == 10  # the first text is computed with each other one


def test_a_query_counts_with_each_document() -> None:
    documents = ["d" * 10, {"text": "e" * 10}, "f" * 10]
    assert text_bytes({"query": "q" * 100, "documents": documents}) == 300 + 30 + 3


def test_token_ids_count_as_they_are() -> None:
    prompt = pooled_prompt({"input": [[1, 2], [3]]})
    assert isinstance(prompt, TokenPrompt) and list(prompt.token_ids) == [1, 2, 3]
    assert pooled_prompt({"input": [[1, "a"]]}) is None


def test_a_body_without_a_prompt_has_none() -> None:
    assert pooled_prompt({"something": "else"}) is None


def test_no_more_prompts_are_read_than_allowed() -> None:
    with pytest.raises(TooManyPartsError):
        pooled_prompt({"input": ["a"] * 4}, max_parts=3)
    with pytest.raises(TooManyPartsError):
        pooled_prompt({"input": [[1]] * 4}, max_parts=3)
