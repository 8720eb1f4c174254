"""What is read of a request's body."""

from __future__ import annotations

from typing import Any

import pytest

from router.errors import InvalidRequestError
from router.prompt import ReadPrompt, read_prompt
from scheduling.blocks import BlockRule


def read(tools: Any, path: str = "/v1/completions", lora: str | None = None, **body: Any) -> ReadPrompt:
    return read_prompt(
        tools.request(path=path, body=body),
        model="m",
        lora=lora,
        rule=BlockRule(block_tokens=16, block_bytes=64),
        bytes_per_token=4.0,
        expected_output_tokens=256,
    )


def test_text_teaches_bytes_per_token_and_token_ids_do_not(tools: Any) -> None:
    assert read(tools, prompt="x" * 400).text_bytes == 400
    assert read(tools, prompt=list(range(100))).text_bytes is None
    assert read(tools, prompt=list(range(100))).chain.prompt_tokens == 100


def test_a_prompt_with_media_teaches_nothing_about_bytes_per_token(tools: Any) -> None:
    text, image = {"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": {"url": "data:a"}}
    plain, illustrated = (
        read(tools, "/v1/chat/completions", messages=[{"role": "user", "content": parts}, {"role": "user"}])
        for parts in ([text], [text, image])
    )

    assert plain.text_bytes is not None
    assert illustrated.text_bytes is None


def test_a_prompt_that_the_engine_truncates_teaches_nothing_about_bytes_per_token(tools: Any) -> None:
    assert read(tools, prompt="x" * 400, truncate_prompt_tokens=None).text_bytes == 400
    assert read(tools, prompt="x" * 400, truncate_prompt_tokens=50).text_bytes is None


def test_an_answer_is_expected_as_configured_or_no_longer_than_its_limit(tools: Any) -> None:
    assert read(tools, prompt="x").expected_output_tokens == 256
    assert read(tools, prompt="x", max_tokens=32_768).expected_output_tokens == 256
    assert read(tools, prompt="x", max_tokens=9).expected_output_tokens == 9
    assert read(tools, prompt="x", max_tokens=9, max_completion_tokens=7).expected_output_tokens == 7


def test_chat_and_completions_are_read_by_their_own_rules(tools: Any) -> None:
    chat = read(tools, "/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.chain.prompt_tokens >= 1
    with pytest.raises(InvalidRequestError) as refused:
        read(tools, "/v1/chat/completions", prompt="hi")
    assert refused.value.param == "messages"


def test_what_parts_caches_parts_chains(tools: Any) -> None:
    plain = read(tools, prompt="the same")
    salted = read(tools, prompt="the same", cache_salt="s")
    adapted = read(tools, prompt="the same", lora="sql")

    assert len({plain.chain.hashes, salted.chain.hashes, adapted.chain.hashes}) == 3
    assert plain.chain.hashes == read(tools, prompt="the same").chain.hashes


@pytest.mark.parametrize("limit", ["7", 1.5, True, -1])
def test_an_output_limit_that_is_no_number_of_tokens_is_refused(tools: Any, limit: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(tools, prompt="x", max_tokens=limit)
    assert refused.value.param == "max_tokens"
    assert "0 or more" in refused.value.message
