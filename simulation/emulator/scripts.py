"""Texts of answers: every token of an answer is known before its first one is due.

A token is four characters. Made-up words are one token each; a text that is given (JSON, a tool's arguments) is cut
into fours, and its last token may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dualmap.simulation.prompts import WORDS

TOKEN_CHARS = 4
_RECOMPUTED = "recomputed"
_PERIOD_CHARS = 4096 * TOKEN_CHARS


def _made_up_text() -> str:
    # A full-period linear congruential walk over the words; long enough that answers differ.
    state, words = 1, []
    for _ in range(_PERIOD_CHARS // TOKEN_CHARS):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        words.append(WORDS[state >> 24].decode("ascii"))
    return "".join(words) * 2


_MADE_UP = _made_up_text()


class Text(Protocol):
    def slice(self, start: int, end: int) -> str:
        """The characters from ``start`` to before ``end``."""


class MadeUpText:
    """An endless text of words; where it starts depends on the seed."""

    def __init__(self, seed: int) -> None:
        self._first = seed * TOKEN_CHARS % _PERIOD_CHARS

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

    def text(self, start: int, count: int) -> str:
        """The text of the tokens from ``start`` to before ``start + count``, as the client sees it."""
        end = (start + count) * TOKEN_CHARS
        if self.visible_chars is not None:
            end = min(end, self.visible_chars)
        return self.source.slice(start * TOKEN_CHARS, end)

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
        begin = min_tokens * TOKEN_CHARS
        # Beyond its period a made-up text repeats.
        end = min(self.tokens * TOKEN_CHARS, begin + _PERIOD_CHARS + max(map(len, stops)))
        text = self.source.slice(begin, end)
        found = [(at + len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
        if not found:
            return self
        last_char, stop = min(found)
        last_char += begin
        return Script(
            source=self.source,
            tokens=-(-last_char // TOKEN_CHARS),
            finish_reason="stop",
            stop_reason=stop,
            visible_chars=last_char if include_stop else last_char - len(stop),
        )
