"""Texts of answers: every token of an answer is known before its first one is due.

A token is four characters. Made-up words are one token each; a text that is given (JSON, a tool's arguments) is cut
into fours, and its last token may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import xxhash

from dualmap.simulation.workload.prompts import WORDS

TOKEN_CHARS = 4
_RECOMPUTED = "recomputed"
_PERIOD = 4096
"""Words after which the made-up text repeats."""
_PERIOD_CHARS = _PERIOD * TOKEN_CHARS
_KNOWN_AGAIN = 4
"""Number of several answers to a prompt that are known again where another prompt goes on with them."""


def _made_up_words() -> list[bytes]:
    # A full-period linear congruential walk over the words; long enough that answers differ.
    state, words = 1, []
    for _ in range(_PERIOD):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        words.append(WORDS[state >> 24])
    return words


def _places(words: Sequence[bytes]) -> dict[bytes, list[int]]:
    """The places of each word in the made-up text."""
    found: dict[bytes, list[int]] = {}
    for place, word in enumerate(words):
        found.setdefault(word, []).append(place)
    return found


_MADE_UP_WORDS = _made_up_words()
_MADE_UP = b"".join(_MADE_UP_WORDS).decode("ascii") * 2
_PLACES = _places(_MADE_UP_WORDS)


class Text(Protocol):
    def slice(self, start: int, end: int) -> str:
        """The characters from ``start`` to before ``end``."""


def next_seed(seed: int) -> int:
    """The seed of the next one of several answers to a prompt."""
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little"), 1)


def _seeds(first: int) -> list[int]:
    """The seeds of the first answers to a prompt, of which the first one has this seed."""
    seeds = [first]
    while len(seeds) < _KNOWN_AGAIN:
        seeds.append(next_seed(seeds[-1]))
    return seeds


def begun_answer(text: bytes, seed_of: int) -> tuple[int, int]:
    """The seed of the made-up text that a prompt begins, or goes on with, and how many tokens of it the prompt ends
    with: a model's next token follows from all before it, so an answer goes on as it would have, on any instance.

    ``seed_of`` is the seed of seeds: that of an answer is the hash of its prompt.
    """
    places = _PLACES.get(text[-TOKEN_CHARS:])
    if places is None:
        return xxhash.xxh3_64_intdigest(text, seed_of), 0
    runs = {place: _words_before(text, place) for place in places}
    longest = max(runs.values())
    hasher, at = xxhash.xxh3_64(seed=seed_of), len(text) - longest * TOKEN_CHARS
    hasher.update(text[:at])
    for said in range(longest, 0, -1):
        for seed in _seeds(hasher.intdigest()):
            if any(run >= said and (place - said + 1 - seed) % _PERIOD == 0 for place, run in runs.items()):
                return seed, said
        hasher.update(text[at : at + TOKEN_CHARS])
        at += TOKEN_CHARS
    return hasher.intdigest(), 0


def _words_before(text: bytes, place: int) -> int:
    """The number of words at the end of the text that are those of the made-up text up to this place."""
    count, end = 0, len(text)
    while end >= TOKEN_CHARS:
        if text[end - TOKEN_CHARS : end] != _MADE_UP_WORDS[(place - count) % _PERIOD]:
            break
        count, end = count + 1, end - TOKEN_CHARS
    return count


class MadeUpText:
    """An endless text of words; where it starts depends on the seed. ``said``: tokens of it that have been given."""

    def __init__(self, seed: int, said: int = 0) -> None:
        self._first = (seed + said) * TOKEN_CHARS % _PERIOD_CHARS

    def slice(self, start: int, end: int) -> str:
        pieces: list[str] = []
        while start < end:
            offset = (self._first + start) % _PERIOD_CHARS
            part = min(end - start, _PERIOD_CHARS)
            pieces.append(_MADE_UP[offset : offset + part])
            start += part
        return "".join(pieces)


class GivenText:
    """A text that is known as a whole."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.tokens = max(1, -(-len(text) // TOKEN_CHARS))

    def slice(self, start: int, end: int) -> str:
        return self._text[start:end]


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: its text, its length and why it ends."""

    source: Text
    tokens: int
    finish_reason: str
    stop_reason: str | None = None
    """The stop string that ended it."""
    visible_chars: int | None = None
    """The client sees no more than this of the text; None: all of it."""
    held_chars: int = 0
    """So many characters are held back until the end: a stop string may begin in them."""

    def text(self, start: int, count: int) -> str:
        """The text of the tokens from ``start`` to before ``start + count``, as the client sees it."""
        begin, end = start * TOKEN_CHARS - self.held_chars, (start + count) * TOKEN_CHARS
        if start + count < self.tokens:
            end = max(0, end - self.held_chars)
        if self.visible_chars is not None:
            end = min(end, self.visible_chars)
        return self.source.slice(max(0, begin), end)

    def token_texts(self, start: int, count: int) -> list[str]:
        """The tokens' own texts, also where they are not seen."""
        text = self.source.slice(start * TOKEN_CHARS, (start + count) * TOKEN_CHARS)
        return [text[at * TOKEN_CHARS : (at + 1) * TOKEN_CHARS] for at in range(count)]

    def given_back(self, tokens: int) -> Script:
        """This answer as a decoder ends it that gives its request back after so many tokens."""
        return replace(self, tokens=tokens, finish_reason="stop", stop_reason=_RECOMPUTED, visible_chars=None)

    @property
    def is_given_back(self) -> bool:
        return self.stop_reason == _RECOMPUTED

    def stopped(self, stops: Sequence[str], *, include_stop: bool, min_tokens: int) -> Script:
        """This answer, ended by the first stop string in it after its first ``min_tokens`` tokens."""
        if not stops:
            return self
        held_chars = 0 if include_stop else max(map(len, stops)) - 1
        begin = min_tokens * TOKEN_CHARS
        # Beyond its period a made-up text repeats.
        end = min(self.tokens * TOKEN_CHARS, begin + _PERIOD_CHARS + max(map(len, stops)))
        text = self.source.slice(begin, end)
        found = [(at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
        if not found:
            return replace(self, held_chars=held_chars)
        last_char, stop = min(found)
        last_char += begin
        return Script(
            source=self.source,
            tokens=-(-last_char // TOKEN_CHARS),
            finish_reason="stop",
            stop_reason=stop,
            visible_chars=last_char if include_stop else last_char - len(stop),
            held_chars=held_chars,
        )
