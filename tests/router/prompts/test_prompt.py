"""The prompt that is read of a request's body."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from dualmap.router.prompts.inference_request import SentPrompt
from dualmap.router.prompts.prompt import (
    LONG_PROMPT_BYTES,
    ReadPrompt,
    TokenCount,
    TokenizedPrompt,
    Unrendered,
    output_limit,
    read_prompt,
    sent_prompt,
)
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule, ContinuedText, KnownText, TextPrompt, cache_seed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.scheduling.values import replaced

LEARNED = Learned(answer_tokens=(20.0, 90.0, 300.0, 500.0, 700.0, 256.0))
"""The last one without a limit."""


async def read(path: str = "/v1/completions", lora: str | None = None, **body: Any) -> ReadPrompt:
    return await read_prompt(
        sent_prompt(path, body),
        model="m",
        lora=lora,
        rule=BlockRule(block_tokens=16, block_bytes=64),
        learned=LEARNED,
    )


async def test_text_teaches_bytes_per_token_and_token_ids_do_not() -> None:
    assert (await read(prompt="x" * 400)).text_bytes == 400
    assert (await read(prompt=list(range(100)))).text_bytes is None
    assert (await read(prompt=list(range(100)))).chain.prompt_tokens == 100


async def test_images_teach_of_their_tokens_and_other_media_nothing() -> None:
    text, image = {"type": "text", "text": "x" * 400}, {"type": "image_url", "image_url": {"url": "data:a"}}
    sound = {"type": "input_audio", "input_audio": {"data": "a"}}
    plain, illustrated, heard = [
        await read("/v1/chat/completions", messages=[{"role": "user", "content": parts}, {"role": "user"}])
        for parts in ([text], [text, image], [text, image, sound])
    ]

    assert plain.text_bytes is not None and plain.images == 0
    assert illustrated.text_bytes is not None and illustrated.images == 1
    assert heard.text_bytes is None


IMAGE = {"url": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": ["hi", {"type": "image_url", "image_url": IMAGE}]}]},
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": ["hi", {"type": "input_image", "image_url": IMAGE["url"]}]}]},
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "hi"},
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                        ],
                    }
                ]
            },
        ),
    ],
)
async def test_an_image_counts_as_the_fleet_learned_and_is_the_same_in_every_api(path: str, body: Any) -> None:
    prompt = (await read(path, **body)).chain
    chat = await read(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": ["hi", {"type": "image_url", "image_url": IMAGE}]}],
    )
    assert 1024 < prompt.prompt_tokens < 1024 + 20
    assert prompt == chat.chain


async def test_a_prompt_that_the_engine_truncates_teaches_nothing_about_bytes_per_token() -> None:
    assert (await read(prompt="x" * 400, truncate_prompt_tokens=None)).text_bytes == 400
    assert (await read(prompt="x" * 400, truncate_prompt_tokens=50)).text_bytes is None


async def test_an_answer_is_expected_as_learned_of_its_limits_class_or_no_longer_than_its_limit() -> None:
    assert (await read(prompt="x")).expected_output_tokens == 256
    assert (await read(prompt="x", max_tokens=32_768)).expected_output_tokens == 700
    assert (await read(prompt="x", max_tokens=200)).expected_output_tokens == 90
    assert (await read(prompt="x", max_tokens=9)).expected_output_tokens == 9
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    assert (await read("/v1/chat/completions", **chat, max_completion_tokens=7)).expected_output_tokens == 7


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/completions", {"max_tokens": 3000, "max_completion_tokens": 1, "max_output_tokens": 1}, 3000),
        ("/v1/completions", {"max_completion_tokens": 1}, None),
        ("/v1/completions", {"max_tokens": None, "max_output_tokens": 1}, None),
        ("/v1/chat/completions", {"max_output_tokens": 1}, None),
        ("/v1/chat/completions", {"max_tokens": "5"}, 5),
        ("/v1/messages", {"max_tokens": 9, "max_completion_tokens": 1}, 9),
        ("/v1/responses", {"max_tokens": 1, "max_output_tokens": 7}, 7),
        ("/v1/responses", {"max_tokens": 1}, None),
        ("/v1/embeddings", {"max_tokens": 100}, 1),
    ],
)
def test_the_limit_of_an_answer_is_read_from_the_field_that_its_engine_reads(
    path: str, body: dict[str, Any], limit: int | None
) -> None:
    assert output_limit(path, body) == limit


async def test_chat_and_completions_are_read_by_their_own_rules() -> None:
    chat = await read("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
    assert chat.chain.prompt_tokens >= 1
    assert sent_prompt("/v1/chat/completions", {"prompt": "hi"}) is None


async def test_what_parts_caches_parts_chains() -> None:
    plain = await read(prompt="the same")
    salted = await read(prompt="the same", cache_salt="s")
    adapted = await read(prompt="the same", lora="sql")

    assert len({plain.chain.hashes, salted.chain.hashes, adapted.chain.hashes}) == 3
    assert plain.chain.hashes == (await read(prompt="the same")).chain.hashes


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 7},
        {"prompt": ""},
        {"prompt": []},
        {"messages": [{"role": "user"}] * 4},
        {"messages": [{"role": "user", "content": ["a", "b"]}] * 2},
        {"messages": [{"role": "user"}], "tools": [{}] * 4},
        {"messages": [{"role": "user"}], "documents": ["a"] * 4},
        {"prompt": ["a"] * 4},
        {"prompt": [[1]] * 4},
        {"prompt_embeds": ["AAAA"] * 4},
    ],
    ids=str,
)
def test_a_body_without_a_prompt_or_with_too_many_parts_has_none_to_schedule_by(body: Any) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert sent_prompt(path, body, max_parts=3) is None


@pytest.mark.parametrize("field", ["max_tokens", "cache_salt", "n", "stop", "tools"])
@pytest.mark.parametrize("value", ["many", 1, -1, [], {}, 1.5])
def test_a_field_that_cannot_be_read_leaves_the_prompt_as_it_is(field: str, value: Any) -> None:
    assert sent_prompt("/v1/completions", {"prompt": "x", field: value}) is not None


async def test_of_a_prompt_with_unknown_parts_nothing_is_learned_and_no_token_computed() -> None:
    sent = sent_prompt(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}, "a" * 400]}]}
    )
    assert sent is not None and sent.source is None and sent.text_bytes is None


async def test_a_long_prompt_is_hashed_in_steps_and_to_the_same_chain() -> None:
    text = "word " * (LONG_PROMPT_BYTES // 4)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    chain = (await read(prompt=text)).chain
    beside.cancel()
    assert turns > 5
    prompt = TextPrompt(text.encode())
    assert chain == BlockRule(block_tokens=16, block_bytes=64).chain(prompt, cache_seed("m"), 4.0)


async def test_token_ids_are_cut_into_the_blocks_that_the_engines_report() -> None:
    rule = BlockRule(128, 512, engine_block_tokens=32)
    sent = sent_prompt("/v1/completions", {"prompt": list(range(100))})
    read = await read_prompt(sent, model="m", lora=None, rule=rule, learned=LEARNED)
    assert (read.chain.block_tokens, len(read.chain.hashes), read.chain.key_stride) == (32, 3, 4)
    text = sent_prompt("/v1/completions", {"prompt": "x" * 1024})
    read = await read_prompt(text, model="m", lora=None, rule=rule, learned=LEARNED)
    assert (read.chain.block_tokens, len(read.chain.hashes), read.chain.key_stride) == (128, 2, 1)


class HeadTokenizer:
    """Knows the tokens of what comes before an image, or of all where they are ``rendered``."""

    def __init__(self, head: Chain, rendered: TokenCount | None = None) -> None:
        self.head = head
        self.rendered = rendered

    status, is_mistrusted = "exact", False

    async def tokenize(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt:
        assert sent.source is not None and sent.source.has_media
        return TokenizedPrompt(self.head, self.rendered, None if self.rendered else Unrendered.OFF)

    def reported(self, count: TokenCount, counted_tokens: int, reported_tokens: int, instance_id: str) -> None:
        raise AssertionError("nothing was counted")

    async def run(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def test_a_prompt_with_an_image_has_engine_blocks_up_to_it_and_is_estimated_from_there() -> None:
    head = engine_chain(range(64), 16)

    async def chain_with(image: str, question: str) -> ReadPrompt:
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
        messages = [{"role": "system", "content": "s" * 300}, {"role": "user", "content": parts}]
        sent = sent_prompt("/v1/chat/completions", {"messages": messages})
        assert sent is not None
        return await read_prompt(
            sent, model="m", lora=None, rule=BlockRule(), learned=Learned(), tokenizer=HeadTokenizer(head)
        )

    cat, again, dog = [await chain_with(image, "what is this? " * 20) for image in ("cat", "cat", "dog")]
    assert cat.chain == again.chain and cat.count is None and cat.images == 1 and cat.unrendered is Unrendered.OFF
    assert cat.chain.hashes[:4] == dog.chain.hashes[:4] == tuple(head.hashes)
    assert cat.chain.hashes[4] != dog.chain.hashes[4]
    assert 64 + 1024 + 60 < cat.chain.prompt_tokens < 64 + 1024 + 120
    assert len(cat.chain.hashes) > (64 + 1024) / 16


async def test_a_rendered_prompt_is_counted_by_its_tokens_and_still_teaches_of_images() -> None:
    count, chain = TokenCount("the instances", frozenset({"image_url"})), engine_chain(range(200), 16)
    parts = [{"type": "image_url", "image_url": {"url": "cat"}}, {"type": "text", "text": "what is this?"}]
    sent = sent_prompt("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert sent is not None
    read = await read_prompt(
        sent, model="m", lora=None, rule=BlockRule(), learned=Learned(), tokenizer=HeadTokenizer(chain, count)
    )
    assert (read.chain, read.count, read.images, read.unrendered) == (chain, count, 1, None)
    assert read.text_bytes == sent.text_bytes


async def test_the_whole_of_a_prompt_whose_beginning_is_not_used_is_that_of_its_tenant() -> None:
    tenants: list[str] = []

    class Tokenizer(HeadTokenizer):
        async def tokenize(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt:
            tenants.append(sent.tenant)
            return TokenizedPrompt(self.head)

    whole = sent_prompt("/v1/completions", {"prompt": "x" * 200})
    assert whole is not None
    begins = KnownText(0, 64, array("Q", [1]), 1, b"")
    sent = replaced(whole, prompt=ContinuedText(begins, [b"x" * 136]), whole=lambda: whole, tenant="acme")
    tokenizer = Tokenizer(engine_chain(range(64), 16))
    await read_prompt(sent, model="m", lora=None, rule=BlockRule(), learned=Learned(), tokenizer=tokenizer)

    assert tenants == ["acme"]
