"""Models without weights to download: the shapes of Qwen2.5 with random weights, and a small tokenizer.

The tokenizer's tokens are the words that ``dualmap replay`` writes, so that prompts have exactly the lengths of the
trace, and words with a capital, so that a load tool that draws ids at random gets a text of as many tokens. The
vocabulary has 4,096 entries instead of 151,936, which is all that differs from the shape's real engine time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_uppercase

from dualmap.simulation.workload.prompts import WORDS
from real_fleet.errors import LackingError

VOCABULARY = 4096
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_SPACE = "Ġ"
"""A space as byte level BPE writes it."""
_FIRST_WORD = 300
"""Words begin there, as ``simulation.workload.prompts`` has them when it sends ids."""
_SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights at two each."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = self.hidden * (2 * self.hidden + 2 * kv) + 3 * self.hidden * self.intermediate
        return 2 * (self.layers * layer + VOCABULARY * self.hidden)


SHAPES = {
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2),
    "qwen2.5-3b": Shape(2048, 11008, 36, 16, 2),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4),
    "qwen2.5-14b": Shape(5120, 13824, 48, 40, 8),
}


def write_model(folder: Path, shape: Shape) -> None:
    """Write configuration and tokenizer of a shape, as ``vllm serve FOLDER --load-format dummy`` reads them.

    Raises:
        LackingError: the package tokenizers is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder / "tokenizer.json")
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131_072, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "chat_template": _CHAT_TEMPLATE,
    }  # fmt: skip
    model = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "max_position_embeddings": 131_072,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
        "use_sliding_window": False, "use_cache": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
        "torch_dtype": "bfloat16", "initializer_range": 0.02,
    }  # fmt: skip
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": True}
    pages = {"tokenizer_config": tokenizer, "config": model, "generation_config": generation}
    for name, page in pages.items():
        (folder / f"{name}.json").write_text(json.dumps(page, indent=1))


def _capital_merges() -> Iterator[tuple[str, str]]:
    """Merges that make words of three letters with a capital. None of them begins in the middle of another one, so
    that a word is one token wherever it stands."""
    for first, vowel in product(ascii_uppercase, "aeiou"):
        yield first, vowel
        for last in "bcdfghjklmnpqrstvwxyz":
            yield first + vowel, last
            yield _SPACE, first + vowel + last


def _write_tokenizer(path: Path) -> None:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise LackingError("a model without weights needs the package tokenizers: pip install tokenizers") from error
    vocabulary = {
        token: number for number, token in enumerate((*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))
    }
    merges: list[tuple[str, str]] = []
    capitals = _capital_merges()

    def fill(size: int) -> None:
        while len(vocabulary) < size:
            merge(*next(capitals))

    def merge(first: str, second: str) -> None:
        if first + second not in vocabulary:
            vocabulary[first + second] = len(vocabulary)
            merges.append((first, second))

    fill(_FIRST_WORD)
    for word in (word.decode().strip() for word in WORDS):
        merge(word[0], word[1])
        merge(word[:2], word[2])
        merge(_SPACE, word)
    fill(VOCABULARY)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    splits = pre_tokenizers.Split(Regex(_SPLITS), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
