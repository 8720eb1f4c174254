"""The fast tokenizer gives the ids that the library gives, or it is not used."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import fastokens  # type: ignore[import-untyped]
import pytest
import tokenizers

from dualmap.router.tokens.encoder import LocalEncoder
from dualmap.router.tokens.fast_tokenizer import Encoded, fast_ids, fast_tokenizer_of, id_bytes
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES

QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
PIECES = [
    *("def ", "it's", "DON'T ", "  \n", "\t", " 12345", "é", "e\u0301", "你好", "🙂", "<|im_end|>", "<|im_", " \u00a0"),
    *("!!", "\r\n", "\x0b", "\x1c", "\u2028", "'ſ", "½", "٣", "Ⅷ", "//\n/", " ", "\n\n", "_", "\x00", "a" * 30, "ﬁ"),
]


def ids_of_each(encoded: Encoded) -> list[bytes]:
    ids, starts = encoded
    return [ids[TOKEN_BYTES * start : TOKEN_BYTES * end] for start, end in pairwise(starts)]


def tokenizer_of(folder: Path, kind: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pre = tokenizers.pre_tokenizers
    if kind != "gpt2":
        made.normalizer = tokenizers.normalizers.NFC()
        split = pre.Split(tokenizers.Regex(QWEN if kind == "qwen" else LLAMA), behavior="isolated")
        made.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    return made


@pytest.mark.parametrize("kind", ["gpt2", "qwen", "llama"])
def test_it_gives_the_ids_that_the_library_gives(model_folder: Path, kind: str) -> None:
    made = tokenizer_of(model_folder, kind)
    fast = fast_tokenizer_of(made)
    assert fast is not None
    chance = random.Random(3)
    texts = ["".join(chance.choices(PIECES, k=chance.randrange(12))) for _ in range(300)]
    assert ids_of_each(fast_ids(fast, texts)) == [
        id_bytes(made.encode(text, add_special_tokens=False).ids) for text in texts
    ]


def test_a_kind_that_it_does_not_know_is_left_to_the_library(model_folder: Path) -> None:
    made = tokenizer_of(model_folder, "gpt2")
    made.normalizer = tokenizers.normalizers.NFKD()
    assert fast_tokenizer_of(made) is None


def test_a_kind_that_it_takes_for_another_is_left_to_the_library(model_folder: Path, tmp_path: Path) -> None:
    described = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
    described["pre_tokenizer"] = None  # a byte-level vocabulary without its bytes
    (tmp_path / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert fast_tokenizer_of(made) is None
    encoder = LocalEncoder(tmp_path)
    assert ids_of_each(encoder.encode(["it is", ""])) == [id_bytes(made.encode("it is").ids), b""]


def test_a_text_that_it_refuses_is_left_to_the_library(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, made = LocalEncoder(model_folder), tokenizer_of(model_folder, "gpt2")

    def refuse(fast: fastokens.Tokenizer, texts: list[str]) -> Encoded:
        raise ValueError("match limit exceeded")

    monkeypatch.setattr("dualmap.router.tokens.encoder.fast_ids", refuse)
    assert ids_of_each(encoder.encode(["def f"])) == [id_bytes(made.encode("def f").ids)]
