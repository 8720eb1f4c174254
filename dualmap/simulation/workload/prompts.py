"""Prompts for trace requests: text that has exactly the trace's lengths and shares exactly its prefixes.

A trace contains ids of blocks, not their text. Every block id gets a text of its own, made from the id alone, so
requests share text as far as they share ids. The words are all three letters and a space: one token each for the
emulator's tokenizer, and about one for a real one.
"""

from __future__ import annotations

from hashlib import shake_128

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.tokenizer import TOKEN_BYTES, render_chat
from dualmap.simulation.workload.traces import TraceRequest

WORDS: tuple[bytes, ...] = tuple(
    bytes((first, second, third, 0x20)) for first in b"bcdfghjklmnprstv" for second in b"aeio" for third in b"lmnr"
)
"""256 words, one for each value of a byte."""

_IDS = {word: 300 + place for place, word in enumerate(WORDS)}
"""Small ids are those of ordinary tokens in every vocabulary, beyond the bytes and the special ones."""

CHAT_OVERHEAD_BYTES = len(render_chat([{"role": "user", "content": ""}]).data)
"""Bytes that the chat form adds to the text of a single user message."""


class PromptWriter:
    """Writes the prompts of one trace.

    Args:
        block_tokens: tokens of one block of the trace.
        salt: another salt gives other texts with the same sharing, so that a second replay finds no old caches.
    """

    def __init__(self, block_tokens: int = 512, salt: str = "") -> None:
        self._block_tokens = block_tokens
        self._salt = salt

    def text(self, request: TraceRequest) -> str:
        """Plain text of exactly ``input_tokens`` tokens."""
        return self._bytes(request, request.input_tokens * TOKEN_BYTES).decode("ascii")

    def message(self, request: TraceRequest) -> str:
        """The text of a single user message, such that the chat as a whole has exactly ``input_tokens`` tokens.

        The chat form itself takes 13 tokens: a shorter input is impossible and gives the shortest one.
        """
        length = max(TOKEN_BYTES, request.input_tokens * TOKEN_BYTES - CHAT_OVERHEAD_BYTES)
        return self._bytes(request, length).decode("ascii")

    def token_ids(self, request: TraceRequest) -> list[int]:
        """The prompt as the right number of token ids, which every model has: a real server counts them as the emulator
        does."""
        text = self._bytes(request, request.input_tokens * TOKEN_BYTES)
        return [_IDS[text[at : at + TOKEN_BYTES]] for at in range(0, len(text), TOKEN_BYTES)]

    def _bytes(self, request: TraceRequest, length: int) -> bytes:
        blocks = -(-length // (self._block_tokens * TOKEN_BYTES))
        if blocks > len(request.hash_ids):
            raise TraceError(
                "trace", None, f"{len(request.hash_ids)} block ids do not cover {request.input_tokens} tokens"
            )
        return b"".join(self._block(block) for block in request.hash_ids[:blocks])[:length]

    def _block(self, block_id: int) -> bytes:
        digest = shake_128(f"{self._salt}:{block_id}".encode()).digest(self._block_tokens)
        return b"".join([WORDS[value] for value in digest])
