"""Texts that tell tokenizers and chat templates apart."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from dualmap.router.prompts.inference_request import TokenSource
from dualmap.router.tokens.comparison import Compared, compare
from dualmap.router.tokens.encoder import LocalEncoder
from dualmap.router.tokens.instance_client import TokenizeError
from dualmap.router.tokens.model_files import read_templates, templates_of
from dualmap.router.tokens.tokenizer import PoolTokenizer
from tests.router import tools
from tests.router.tokens.tokenizer_files import TEMPLATE

Change = Callable[[tokenizers.Tokenizer], None]


def _whitespace(made: tokenizers.Tokenizer) -> None:
    pattern = tokenizers.Regex(r"\s+|[^\s]+")
    pre = tokenizers.pre_tokenizers
    split = pre.Split(pattern, behavior="isolated")
    made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def _digits(made: tokenizers.Tokenizer) -> None:
    pre = tokenizers.pre_tokenizers
    made.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])


def _composed(made: tokenizers.Tokenizer) -> None:
    made.normalizer = tokenizers.normalizers.NFC()


def _prefix_space(made: tokenizers.Tokenizer) -> None:
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)


def _begins(made: tokenizers.Tokenizer) -> None:
    token = "<|endoftext|>"
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, made.token_to_id(token))]
    )


def _special(made: tokenizers.Tokenizer) -> None:
    made.add_special_tokens(["<think>"])


class Elsewhere:
    """An instance that has its own files."""

    def __init__(self, tokenizer: PoolTokenizer) -> None:
        self.tokenizer = tokenizer

    async def ids(self, source: TokenSource, url: str) -> array[int] | None:
        return await self.tokenizer.ids(source)


@pytest.fixture
async def tokenizer_of(model_folder: Path, tmp_path: Path) -> AsyncIterator[Callable[..., PoolTokenizer]]:
    threads = ThreadPoolExecutor(1)

    def make(change: Change | None = None, template: str | None = None) -> PoolTokenizer:
        made = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        if change is not None:
            change(made)
        made.save(str(tmp_path / "tokenizer.json"))
        templates = templates_of({"default": template}, {}, {}) if template else read_templates(model_folder)
        return PoolTokenizer(
            LocalEncoder(tmp_path), templates, threads=threads, timeout_s=5, max_bytes=0, count=lambda _: None
        )

    yield make
    threads.shutdown()


async def compared(own: PoolTokenizer, other: PoolTokenizer) -> tuple[Compared, ...]:
    found = await compare(own, Elsewhere(other), tools.spec("a"))
    assert found is not None and any(each.is_chat for each in found)
    return found


async def test_equal_tokenizers_agree_in_all_texts(tokenizer_of: Callable[..., PoolTokenizer]) -> None:
    assert all(each.agreed for each in await compared(tokenizer_of(), tokenizer_of()))


@pytest.mark.parametrize("change", [_whitespace, _digits, _composed, _prefix_space, _begins, _special])
async def test_tokenizers_that_differ_in_one_thing_differ_in_a_text(
    tokenizer_of: Callable[..., PoolTokenizer], change: Change
) -> None:
    found = await compared(tokenizer_of(), tokenizer_of(change))
    assert not all(each.agreed for each in found if not each.is_chat)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"),
        ("{{ tool | tojson }}", "{{ tool.function | tojson }}"),
        ("{{ message.content }}", "{{ message.content | trim }}"),
        ("call.function.arguments | tojson", "call.function.arguments | string"),
        (
            "{{ message.content }}",
            "{% if message.content is string %}{{ message.content }}{% else %}"
            "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
        ),
    ],
)
async def test_templates_that_differ_in_one_thing_differ_in_a_chat(
    tokenizer_of: Callable[..., PoolTokenizer], model_folder: Path, was: str, becomes: str
) -> None:
    assert was in TEMPLATE
    found = await compared(tokenizer_of(), tokenizer_of(template=TEMPLATE.replace(was, becomes)))
    assert all(each.agreed for each in found if not each.is_chat)
    assert not all(each.agreed for each in found if each.is_chat)


async def test_an_instance_that_does_not_tokenize_says_nothing(tokenizer_of: Callable[..., PoolTokenizer]) -> None:
    class Silent:
        async def ids(self, source: TokenSource, url: str) -> array[int] | None:
            raise TokenizeError("404")

    assert await compare(tokenizer_of(), Silent(), tools.spec("a")) is None
