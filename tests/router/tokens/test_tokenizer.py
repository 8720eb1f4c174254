"""The tokenizer of a pool: chains equal those of the whole prompt's tokens, and a later turn pays for its own words."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.tokens.encoder import AT_ONCE_CHARS, LocalEncoder
from dualmap.router.tokens.fast_tokenizer import Encoded
from dualmap.router.tokens.model_files import read_templates
from dualmap.router.tokens.tokenizer import MAX_WAITING, PoolTokenizer
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import BlockExtras, engine_chain
from tests.support.bodies import BODIES, ODD_VALUES, places, with_value

BLOCK_TOKENS = 16
WORDS = Path(__file__).read_text(encoding="utf-8") + "é你好 <|im_end|> \n\n  "


class CountingEncoder(LocalEncoder):
    """Notes how much it is given, and waits while ``gate`` is closed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.given_chars = 0
        self.given_texts: list[str] = []
        self.threads: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, texts: list[str]) -> Encoded:
        assert self.gate.wait(30)
        self.given_chars += sum(map(len, texts))
        self.given_texts += texts
        self.threads.add(threading.current_thread().name)
        return super().encode(texts)


@pytest.fixture
def encoder(model_folder: Path) -> CountingEncoder:
    return CountingEncoder(model_folder)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as pool:
        yield pool


@pytest.fixture
def results() -> list[str]:
    return []


@pytest.fixture
def tokenizer(
    encoder: CountingEncoder, model_folder: Path, threads: ThreadPoolExecutor, results: list[str]
) -> PoolTokenizer:
    return PoolTokenizer(
        encoder, read_templates(model_folder), threads=threads, timeout_s=20, max_bytes=1 << 20, count=results.append
    )


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system" if not at else ("assistant", "user")[at % 2], "content": text}
        for at, text in enumerate(contents)
    ]
    return {"messages": messages, **fields}


async def chain_of(tokenizer: PoolTokenizer, body: dict[str, Any], lora: str | None = None) -> Chain | None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await tokenizer.chain(sent_prompt(path, body), lora=lora, block_tokens=BLOCK_TOKENS)


def expected(folder: Path, body: dict[str, Any], extras: BlockExtras | None = None, *, special: bool = False) -> Chain:
    """By the library alone, from the whole text."""
    templates = read_templates(folder)
    assert templates is not None
    text = templates.of(body).render(body) if "messages" in body else body["prompt"]
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=special)
    return engine_chain(found.ids, BLOCK_TOKENS, extras or BlockExtras())


async def test_chains_of_conversations_equal_those_of_their_whole_text(
    tokenizer: PoolTokenizer, model_folder: Path
) -> None:
    chance = random.Random(5)
    conversations = [["You help." * 30 * (place % 3)] for place in range(6)]
    for _ in range(40):
        conversation = chance.choice(conversations)
        for _ in range(chance.choice((1, 2))):
            start, length = chance.randrange(len(WORDS)), chance.choice((0, 3, 200, 3000))
            conversation.append(WORDS[start : start + length])
        body = chat(*conversation)
        assert await chain_of(tokenizer, body) == expected(model_folder, body)


async def test_a_later_turn_is_tokenized_from_its_own_words_on(
    tokenizer: PoolTokenizer, encoder: CountingEncoder, results: list[str]
) -> None:
    first = ["system " * 400, "question " * 2000]
    await chain_of(tokenizer, chat(*first))
    encoder.given_chars = 0
    await chain_of(tokenizer, chat(*first, "answer", "and now?"))
    assert encoder.given_chars < 200
    assert results == []


async def test_what_is_known_of_texts_is_apart_for_each_tenant(
    tokenizer: PoolTokenizer, encoder: CountingEncoder
) -> None:
    given = []
    for tenant in ("a", "b", "a"):
        sent = sent_prompt("/v1/chat/completions", chat("system " * 400, "question " * 2000))
        sent.tenant, encoder.given_chars = tenant, 0
        await tokenizer.chain(sent, lora=None, block_tokens=BLOCK_TOKENS)
        given.append(encoder.given_chars)

    assert given[0] == given[1] > 10_000 > given[2]


async def test_a_message_s_end_and_the_opening_of_the_answer_are_one_place_to_start_from(
    tokenizer: PoolTokenizer, encoder: CountingEncoder
) -> None:
    first = ["system " * 400, "question " * 400]
    await chain_of(tokenizer, chat(*first))
    encoder.given_texts.clear()
    await chain_of(tokenizer, chat(*first, "answer " * 200, "and now?"))
    assert encoder.given_texts[0].startswith("<|im_end|>\n<|im_start|>assistant\nanswer")
    assert encoder.given_texts[-1] == "<|im_end|>\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


async def test_byte_blocks_are_not_made_where_tokens_are(
    tokenizer: PoolTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pieces: object) -> bytes:
        raise AssertionError("the prompt was rendered for byte blocks")

    monkeypatch.setattr("dualmap.scheduling.prompts.blocks.joined", refuse)
    assert await chain_of(tokenizer, chat("system", "question")) is not None


async def test_lora_and_salt_separate_chains_and_what_is_kept_of_them(
    tokenizer: PoolTokenizer, model_folder: Path
) -> None:
    body = chat("s" * 3000, "q")
    for lora, salt in ((None, None), ("sql", None), ("sql", "tenant"), (None, "tenant"), (None, None)):
        sent = body if salt is None else {**body, "cache_salt": salt}
        assert await chain_of(tokenizer, sent, lora) == expected(model_folder, body, BlockExtras.of(lora, salt))


async def test_completions_are_tokenized_with_their_special_tokens(
    tokenizer: PoolTokenizer, model_folder: Path
) -> None:
    body = {"prompt": WORDS}
    assert await chain_of(tokenizer, body) == expected(model_folder, body, special=True)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


async def test_with_an_image_the_chain_is_that_of_what_comes_before_its_message(
    tokenizer: PoolTokenizer, model_folder: Path, results: list[str]
) -> None:
    text = chat("You help. " * 50, "question " * 20, "answer")
    shown = {"role": "user", "content": [{"type": "text", "text": "what is this?"}, IMAGE]}
    body = {"messages": [*text["messages"], shown, {"role": "assistant", "content": "a cat"}]}

    head = expected(model_folder, {**text, "add_generation_prompt": False})

    assert await chain_of(tokenizer, body) == head
    assert results == []


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}USER: {{ m.content }}{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ loop.length }}{{ m.content }}<|im_end|>{% endfor %}",
        "{% for m in messages %}<|im_start|>{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% if messages[-1].content[0].type == 'image' %}!{% endif %}<|im_end|>{% endfor %}",
    ],
    ids=["no special token ends what comes before", "the rest changes it", "the image changes it"],
)
async def test_a_template_that_does_not_part_the_image_from_what_comes_before_is_not_followed(
    template: str, model_folder: Path, encoder: CountingEncoder, threads: ThreadPoolExecutor, results: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "template.jinja").write_text(template)
    templates = read_templates(model_folder, template_file=tmp_path / "template.jinja")
    tokenizer = PoolTokenizer(
        encoder, templates, threads=threads, timeout_s=20, max_bytes=1 << 20, count=results.append
    )
    body = chat("You help. " * 50)
    body["messages"].append({"role": "user", "content": [IMAGE]})

    assert await chain_of(tokenizer, body) is None
    assert results == ["bytes"]


async def test_a_prompt_of_which_tokens_cannot_be_computed_has_none(
    tokenizer: PoolTokenizer, results: list[str]
) -> None:
    assert await chain_of(tokenizer, {"messages": [{"role": "user", "content": [IMAGE]}]}) is None
    assert await chain_of(tokenizer, {"prompt": [1, 2, 3]}) is None
    assert await chain_of(tokenizer, {"prompt": ["a", "b"]}) is None
    assert await chain_of(tokenizer, {"prompt": "\ud800"}) is None
    assert results == ["bytes"] * 4


async def test_a_long_rest_is_tokenized_by_a_thread_and_a_short_one_at_once(
    tokenizer: PoolTokenizer, encoder: CountingEncoder
) -> None:
    await chain_of(tokenizer, chat("short"))
    assert encoder.threads == {threading.current_thread().name}
    await chain_of(tokenizer, chat("x" * 2 * AT_ONCE_CHARS))
    assert any(name.startswith("tokenize") for name in encoder.threads)


async def test_a_prompt_that_is_not_tokenized_in_time_has_no_chain_and_its_repetition_has(
    encoder: CountingEncoder, model_folder: Path, threads: ThreadPoolExecutor, results: list[str]
) -> None:
    hasty = PoolTokenizer(
        encoder, read_templates(model_folder), threads=threads, timeout_s=0.01, max_bytes=1 << 20, count=results.append
    )
    body = chat("x y" * AT_ONCE_CHARS)
    encoder.gate.clear()
    assert await chain_of(hasty, body) is None
    encoder.gate.set()
    await asyncio.get_running_loop().run_in_executor(threads, int)  # behind the first one
    encoder.given_chars = 0
    assert await chain_of(hasty, body) == expected(model_folder, body)
    assert encoder.given_chars < 100
    assert results == ["late"]


async def test_no_more_prompts_wait_for_a_thread_than_a_few(
    tokenizer: PoolTokenizer, encoder: CountingEncoder, results: list[str]
) -> None:
    encoder.gate.clear()
    body = chat("x" * 2 * AT_ONCE_CHARS)
    waiting = [asyncio.create_task(chain_of(tokenizer, body)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert await chain_of(tokenizer, body) is None
    assert results == ["busy"]
    encoder.gate.set()
    assert None not in await asyncio.gather(*waiting)


async def test_cancelled_requests_leave_their_places_to_others(
    tokenizer: PoolTokenizer, encoder: CountingEncoder
) -> None:
    encoder.gate.clear()
    body = chat("x" * 2 * AT_ONCE_CHARS)
    waiting = [asyncio.create_task(chain_of(tokenizer, body)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    encoder.gate.set()
    async with asyncio.timeout(60):
        while await chain_of(tokenizer, body) is None:  # noqa: ASYNC110 - places are free once threads have ended
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
async def test_whatever_value_stands_anywhere_in_a_body_it_is_tokenized_or_left_to_its_bytes(
    tokenizer: PoolTokenizer, path: str
) -> None:
    found = []
    for place in places(BODIES[path]):
        for value in ODD_VALUES:
            sent = sent_prompt(path, with_value(BODIES[path], place, value))
            if sent is not None and sent.source is not None:
                found.append(await tokenizer.chain(sent, lora=None, block_tokens=BLOCK_TOKENS))
    assert found
