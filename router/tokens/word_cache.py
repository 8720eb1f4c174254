"""Token ids of short texts by the words that they consist of, for the tokenizers that most models have.

A byte-level BPE splits a text into words by a regular expression, and turns each word into tokens on its own. The
library does that at a few hundred nanoseconds a character, most of it to keep track of offsets, not needed here.
The same expression and a dictionary of words take a fraction of it for a short text; for a long one the library is
used, as it leaves the interpreter to others meanwhile.

What a tokenizer must be for this is read from its description, and the result is compared with the library's on texts
of all kinds before it is used at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final
from unicodedata import is_normalized

import regex  # type: ignore[import-untyped]

Encode = Callable[[Sequence[str]], list[list[int]]]

_MAX_WORDS: Final = 50_000
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ``ByteLevel`` splits by unless it is told not to."""
_SAMPLES: Final = (
    "def f(x):\n    return x + 1  # it's\n\n\n\tif x: pass\r\n",
    "He said: \"we'll see\" — 12345 6.7e8, 100% of ½… I'M, DON'T",
    "   leading and trailing   \n \n",
    "Größe naïve ﬁ Ⅷ 你好，世界。こんにちは 안녕 привет שלום मन्दिर",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2003x\u200by\ufeff",
    '{"a": [1, 2.5, -3e10, null], "b": "\\u00e9\\n"}',
    "a" * 40 + " " + "1" * 20 + "!" * 20 + " " * 20,
)


class WordCache:
    """Made by ``word_cache_of``."""

    def __init__(self, pattern: str, normal_form: str | None, specials: Sequence[str], encode: Encode) -> None:
        self._find = regex.compile(pattern).findall
        self._split = regex.compile("(" + "|".join(map(regex.escape, specials)) + ")").split if specials else None
        self._normal_form: Any = normal_form
        self._encode = encode
        self._words: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """The ids of a text without added special tokens."""
        if self._normal_form is not None and not text.isascii() and not is_normalized(self._normal_form, text):
            return self._encode([text])[0]
        find, known = self._find, self._words
        if self._split is None:
            words = find(text)
        else:
            words = []
            for place, part in enumerate(self._split(text)):
                if place % 2:  # a special token
                    words.append(part)
                else:
                    words += find(part)
        missing = {word for word in words if word not in known}
        if missing:
            self._learn(list(missing))
        ids: list[int] = []
        for word in words:
            ids += known[word]
        if len(known) > _MAX_WORDS:
            known.clear()
        return ids

    def _learn(self, words: list[str]) -> None:
        for word, ids in zip(words, self._encode(words), strict=True):
            self._words[word] = tuple(ids)


def word_cache_of(description: str, specials: Sequence[str], encode: Encode) -> WordCache | None:
    """For a tokenizer by its description as JSON; None where words are not independent, or the comparison fails.

    ``specials`` are its special tokens, the longest first; ``encode`` is the library's.
    """
    found = json.loads(description)
    pattern = _pattern(found.get("pre_tokenizer"))
    normalizer = found.get("normalizer")
    form = normalizer.get("type") if isinstance(normalizer, dict) else None
    model = found.get("model") or {}
    is_plain = model.get("type") == "BPE" and not model.get("dropout") and form in (None, "NFC", "NFKC", "NFD", "NFKD")
    if pattern is None or not is_plain:
        return None
    try:
        cache = WordCache(pattern, form, specials, encode)
    except regex.error:
        return None
    samples = [*_SAMPLES, *(special + sample for special in specials for sample in _SAMPLES[:2])]
    return cache if [cache.encode(sample) for sample in samples] == encode(samples) else None


def _pattern(pre_tokenizer: Any) -> str | None:
    """The expression that words are found by, if all that follows is their bytes."""
    if not isinstance(pre_tokenizer, dict):
        return None
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1].get("type") != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    if len(steps) == 1:
        return _GPT2 if steps[0].get("use_regex", True) else None
    if len(steps) != 2 or steps[1].get("use_regex", True):
        return None
    split, pattern = steps[0], steps[0].get("pattern")
    if split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return pattern.get("Regex") if isinstance(pattern, dict) else None
