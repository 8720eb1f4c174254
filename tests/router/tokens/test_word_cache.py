"""Words give the ids that the library gives, or they are not used."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import regex
import tokenizers

from router.tokens.word_cache import WordCache, ascii_form, id_bytes, word_cache_of

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PIECES = [
    "def ",
    "it's",
    "DON'T ",
    "  \n",
    "\t",
    " 12345",
    "é",
    "e\u0301",
    "你好",
    "🙂",
    "<|im_end|>",
    "<|im_",
    " \u00a0",
    "!!",
    "\r\n",
]


def tokenizer_of(folder: Path, kind: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pre = tokenizers.pre_tokenizers
    if kind == "qwen":
        made.normalizer = tokenizers.normalizers.NFC()
        split = pre.Split(tokenizers.Regex(QWEN), behavior="isolated")
        made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    return made


def cache_of(made: tokenizers.Tokenizer) -> WordCache | None:
    return word_cache_of(made, sorted(SPECIALS, key=len, reverse=True))


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_words_give_the_ids_that_the_library_gives(model_folder: Path, kind: str) -> None:
    made = tokenizer_of(model_folder, kind)
    cache = cache_of(made)
    assert cache is not None
    chance = random.Random(3)
    for _ in range(300):
        text = "".join(chance.choices(PIECES, k=chance.randrange(12)))
        assert cache.encode(text) == id_bytes(made.encode(text, add_special_tokens=False).ids), text


def test_tokenizers_whose_words_are_not_independent_have_none(model_folder: Path) -> None:
    described = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
    spaced = {**described, "pre_tokenizer": {**described["pre_tokenizer"], "add_prefix_space": True}}
    lower = {**described, "normalizer": {"type": "Lowercase"}}
    whole = {**described, "pre_tokenizer": None}
    for other in (spaced, lower, whole):
        assert cache_of(tokenizers.Tokenizer.from_str(json.dumps(other))) is None


def test_a_result_that_differs_from_the_librarys_is_not_used(model_folder: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert word_cache_of(made, SPECIALS[:2]) is not None
    made.add_tokens(["return x"])  # taken out of a text before its words are found
    assert word_cache_of(made, SPECIALS) is None


def test_the_form_for_ascii_finds_what_the_pattern_finds() -> None:
    ascii_pattern = ascii_form(QWEN)
    assert ascii_pattern is not None
    chance = random.Random(4)
    for _ in range(500):
        text = "".join(chance.choices("aZ09 \t\n\r'sd!#\x1c\x0b_", k=chance.randrange(20)))
        assert re.findall(ascii_pattern, text, re.ASCII) == regex.findall(QWEN, text), repr(text)
    assert ascii_form(r"\p{Lu}+|.") is None


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_a_long_text_is_left_to_the_library_until_most_of_its_words_are_known(model_folder: Path, kind: str) -> None:
    made = tokenizer_of(model_folder, kind)
    cache = cache_of(made)
    assert cache is not None
    names = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(400)]
    text = " ".join(f"{name}\n<|im_start|>" for name in names)
    found = [cache.encode_known(text) for _ in range(8)]
    assert found[0] is None
    assert found[-1] == id_bytes(made.encode(text, add_special_tokens=False).ids)
