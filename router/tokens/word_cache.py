"""Token ids of short texts by the words that they consist of, for the tokenizers that most models have.

A byte-level BPE splits a text into words by a regular expression, and turns each word into tokens on its own. The
library does that at a few hundred nanoseconds a character, most of it to keep track of offsets, not needed here.
The same expression and a dictionary of words take a fraction of it where most words are known: a new word costs as much
as the library takes for it.

What a tokenizer must be for this is read from its description, and the result is compared with the library's on texts
of all kinds before it is used at all.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final
from unicodedata import is_normalized

import regex  # type: ignore[import-untyped]
from tokenizers import Tokenizer

_MAX_WORDS: Final = 50_000
_NEW_WORDS_SHARE: Final = 10
"""Of a long text, one in so many words may be new."""
_LEARNED_AT_ONCE: Final = 100
"""New words of a long text that is left to the library."""
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What ``ByteLevel`` splits by unless it is told not to."""
_ASCII: Final = {r"\p{L}": "A-Za-z", r"\p{N}": "0-9"}
_SAMPLES: Final = (
    "def f(x):\n    return x + 1  # it's\n\n\n\tif x: pass\r\n",
    "He said: \"we'll see\" — 12345 6.7e8, 100% of ½… I'M, DON'T",
    "   leading and trailing   \n \n",
    "Größe naïve ﬁ Ⅷ 你好，世界。こんにちは 안녕 привет שלום मन्दिर",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2003x\u200by\ufeff",
    '{"a": [1, 2.5, -3e10, null], "b": "\\u00e9\\n"}',
    "a" * 40 + " " + "1" * 20 + "!" * 20 + " " * 20,
)


class _Words(dict[str, bytes]):
    """Token ids of words, as ``WordCache.encode`` gives them; one that is not known yet is learned when it is read."""

    def __init__(self, tokenizer: Tokenizer, specials: Sequence[str]) -> None:
        super().__init__({special: id_bytes([tokenizer.token_to_id(special) or 0]) for special in specials})
        self._model = tokenizer.model

    def __missing__(self, word: str) -> bytes:
        """By the model alone: the word's bytes as the letters that stand for them there."""
        letters = word.encode().decode("latin-1").translate(_BYTE_LETTERS)
        ids = self[word] = id_bytes([token.id for token in self._model.tokenize(letters)])
        return ids


class WordCache:
    """Made by ``word_cache_of``."""

    def __init__(self, pattern: str, normal_form: str | None, specials: Sequence[str], tokenizer: Tokenizer) -> None:
        self._find = regex.compile(pattern).findall
        ascii_pattern = ascii_form(pattern)
        self._find_ascii = re.compile(ascii_pattern, re.ASCII).findall if ascii_pattern is not None else self._find
        self._split = re.compile("(" + "|".join(map(re.escape, specials)) + ")").split
        self._normal_form: Any = normal_form
        self._tokenizer = tokenizer
        self._specials = specials
        self._words = _Words(tokenizer, specials)

    def encode(self, text: str) -> bytes:
        """The ids of a text without added special tokens, see ``id_bytes``."""
        find = self._find_ascii
        if not text.isascii():
            if self._normal_form is not None and not is_normalized(self._normal_form, text):
                return id_bytes(self._tokenizer.encode(text, add_special_tokens=False).ids)
            find = self._find
        ids = b"".join(map(self._words.__getitem__, self._split_words(text, find)))
        self._bound()
        return ids

    def encode_known(self, text: str) -> bytes | None:
        """The same for an ASCII text; None if too many of its words are new. Some of these are learned then."""
        words, known = self._split_words(text, self._find_ascii), self._words
        new = set(words).difference(known)
        if too_many := len(new) * _NEW_WORDS_SHARE > len(words):
            new = set(islice(new, _LEARNED_AT_ONCE))
            for word in new:
                known[word]
        ids = None if too_many else b"".join(map(known.__getitem__, words))
        self._bound()
        return ids

    def _split_words(self, text: str, find: Callable[[str], list[str]]) -> list[str]:
        words: list[str] = []
        for place, part in enumerate(self._split(text)):
            if place % 2:  # a special token
                words.append(part)
            else:
                words += find(part)
        return words

    def _bound(self) -> None:
        if len(self._words) > _MAX_WORDS:
            self._words = _Words(self._tokenizer, self._specials)


def id_bytes(ids: Sequence[int]) -> bytes:
    """Token ids in the form in which blocks of them are hashed: unsigned 32-bit numbers, one after the other."""
    return array("I", ids).tobytes()


def _byte_letters() -> dict[int, int]:
    """The letter that a byte-level model has for each byte: itself where it is printable, else one from 256 on. Source:
    GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + place for place, byte in enumerate(others)}


_BYTE_LETTERS: Final = _byte_letters()


def word_cache_of(tokenizer: Tokenizer, specials: Sequence[str]) -> WordCache | None:
    """None where a tokenizer's words are not independent, or where the comparison with it fails. ``specials`` are its
    special tokens, the longest first; there must be some."""
    described = json.loads(tokenizer.to_str())
    pattern = _pattern(described.get("pre_tokenizer"))
    normalizer = described.get("normalizer")
    form = normalizer.get("type") if isinstance(normalizer, dict) else None
    model = described.get("model") or {}
    is_plain = model.get("type") == "BPE" and not model.get("dropout") and form in (None, "NFC", "NFKC", "NFD", "NFKD")
    if pattern is None or not is_plain or not specials:
        return None
    try:
        cache = WordCache(pattern, form, specials, tokenizer)
    except regex.error:
        return None
    samples = [*_SAMPLES, *(special + sample for special in specials for sample in _SAMPLES[:2])]
    expected = [id_bytes(found.ids) for found in tokenizer.encode_batch_fast(samples, add_special_tokens=False)]
    return cache if [cache.encode(sample) for sample in samples] == expected else None


def ascii_form(pattern: str) -> str | None:
    """An expression for ASCII texts that the standard library takes, twice as fast: letters and digits in the place
    of ``\\p{L}`` and ``\\p{N}``; None if the pattern has other properties."""
    written, in_class = [], False
    for piece in re.findall(r"\\p\{[^}]*\}|\\.|.", pattern, re.DOTALL):
        if piece in _ASCII:
            written.append(_ASCII[piece] if in_class else f"[{_ASCII[piece]}]")
            continue
        if piece.startswith(("\\p", "\\P", "\\X")):
            return None
        if piece in ("[", "]"):
            in_class = piece == "["
        written.append(piece)
    try:
        re.compile("".join(written), re.ASCII)
    except re.error:
        return None
    return "".join(written)


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
