"""Bounds on what a request may compute."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.prompts.inference_request import TokenBounds
from dualmap.router.prompts.prompt import ReadPrompt, TokenCount, sent_prompt
from dualmap.router.prompts.token_bounds import (
    MOST_TOKENS,
    answer_bound,
    passed_on_tokens,
    prompt_bound,
    unread_tokens,
)
from dualmap.scheduling.prompts.chain import Chain

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "asks"),
    [
        ("/invocations", {**CHAT, "max_tokens": 9, "n": 3}, TokenBounds(100, 9, 3)),
        ("/invocations", {**CHAT, "max_output_tokens": 1}, TokenBounds(100, None)),
        ("/invocations", {"prompt": ["a", "b"], "max_tokens": 9, "n": 2}, TokenBounds(100, 9, 4)),
        ("/invocations", {"prompt": "a"}, TokenBounds(100, None)),
        ("/invocations", {"prompt_embeds": ["A", "B"], "max_tokens": 9, "n": 2}, TokenBounds(100, 9, 4)),
        ("/invocations", {**CHAT, "prompt": "a", "max_tokens": None}, TokenBounds(100, None)),
        ("/invocations", {**CHAT, "prompt": "a", "max_tokens": 5, "max_completion_tokens": 7}, TokenBounds(100, 7)),
        ("/invocations", {"input": "a"}, TokenBounds(100, 1)),
        ("/v1/chat/completions/batch", {"messages": [[{}], [{}]], "n": 3, "max_tokens": 9}, TokenBounds(100, 9, 6)),
        ("/inference/v1/generate", {"sampling_params": {"max_tokens": 9, "n": 2}}, TokenBounds(100, 9, 2)),
        ("/inference/v1/generate", {"token_ids": [1], "max_tokens": 1}, TokenBounds(100, None)),
        ("/inference/v1/generate", {"sampling_params": "odd"}, TokenBounds(100, None)),
        ("/generative_scoring", {"query": "q", "items": ["a", "b", "c"]}, TokenBounds(300, 1, 3)),
        ("/v1/chat/completions", {"messages": 7, "max_completion_tokens": 9}, TokenBounds(100, 9)),
        ("/v1/embeddings", {"input": {}}, TokenBounds(100, 1)),
        ("/v1/what/ever", {"n": 4, "max_tokens": 1}, TokenBounds(100, None, 4)),
        ("/v1/what/ever", {"n": 10**30}, TokenBounds(100, None, MOST_TOKENS)),
        ("/v1/what/ever", {"n": "many"}, TokenBounds(100, None, 1)),
        ("/tokenize", {"prompt": "a"}, None),
        ("/v1/messages/count_tokens", CHAT, None),
        ("/v1/chat/completions/render", CHAT, None),
    ],
)  # fmt: skip
def test_a_body_that_is_passed_on_says_what_it_asks_for(
    path: str, body: dict[str, Any], asks: TokenBounds | None
) -> None:
    assert passed_on_tokens(path, body, 100) == asks


def test_of_a_body_that_was_not_read_its_bytes_are_known_and_of_a_form_nothing() -> None:
    assert unread_tokens("/v1/chat/completions", 100) == TokenBounds(100, None)
    assert unread_tokens("/v1/audio/transcriptions", 100, form=True) == TokenBounds(0, None)
    assert unread_tokens("/v1/responses/resp_1", 0) is None
    assert unread_tokens("/detokenize", 100) is None


@pytest.mark.parametrize(
    ("limit", "answers", "context", "bound"),
    [(9, 3, None, 27), (9, 3, 5, 15), (None, 2, 100, 200), (0, 1, 100, 100), (None, 1, None, None), (0, 1, None, None)],
)
def test_an_answer_without_a_limit_may_have_the_rest_of_the_context(
    limit: int | None, answers: int, context: int | None, bound: int | None
) -> None:
    assert answer_bound(limit, answers, context) == bound
    assert answer_bound(2**31, 2**52, None) == MOST_TOKENS


def test_a_prompt_has_no_more_tokens_than_bytes_unless_they_were_counted() -> None:
    sent = sent_prompt("/v1/completions", {"prompt": "é" * 100})
    assert sent is not None
    estimated = ReadPrompt(Chain((), 16, 50), 200, 16, stored_tokens=7)

    assert prompt_bound(sent, estimated) == 207
    counted = ReadPrompt(Chain((), 16, 50), 200, 16, count=TokenCount("engine", frozenset()))
    assert prompt_bound(sent, counted) == 50
    ids = sent_prompt("/v1/completions", {"prompt": [1, 2, 3]})
    assert ids is not None
    assert prompt_bound(ids, ReadPrompt(Chain((), 16, 3), None, 16)) == 3
