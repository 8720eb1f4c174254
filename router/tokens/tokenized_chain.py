"""From a rendered prompt to its chain of engine blocks, by tokenizing no more than what is new."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Generator, Sequence
from typing import Final

import xxhash

from router.tokens.encoder import Encoder
from router.tokens.fast_tokenizer import id_bytes
from router.tokens.prefix_cache import Known, PrefixCache, Tokenized, prefix_grid
from scheduling.chain import Chain
from scheduling.engine_blocks import ROOT, TOKEN_BYTES, BlockExtras, block_hash, key_stride

_SEGMENT_BYTES: Final = 1024
"""Boundaries nearer to each other than this are not kept, except for the last."""

Texts = Sequence[str]
Steps = Generator[Texts, list[bytes], Chain]


class ChainMaker:
    """Chains of one pool's prompts. Used by the event loop and by threads, one at a time at each step."""

    def __init__(self, encoder: Encoder, *, max_bytes: int) -> None:
        self._encoder = encoder
        self._cache = PrefixCache(max_bytes)
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        return self._cache.memory_bytes

    def steps(self, text: bytes, block_tokens: int, extras: BlockExtras, *, add_special_tokens: bool) -> Steps:
        """Yields the texts to tokenize (once), is sent their token ids, and returns the chain.

        Chains of a ``block_tokens`` and of extras that differ share nothing.
        """
        seed = _seed(block_tokens, extras, add_special_tokens)
        grid = prefix_grid(text, seed)
        with self._lock:
            start = self._cache.find(grid, text)
        begin = start.end if start is not None else 0
        ends = self._boundaries(text, begin)
        starts = [begin, *ends]
        segments = [text[at:end] for at, end in zip(starts, [*ends, len(text)], strict=True)]
        encoded = yield [segment.decode() for segment in segments]
        growing = _Growing(start, block_tokens, extras, self._encoder.first_ids if add_special_tokens else ())
        for end, ids in zip(ends, encoded, strict=False):
            growing.take(ids)
            growing.mark(end)
        growing.take(encoded[-1])
        if add_special_tokens:
            growing.take(id_bytes(self._encoder.last_ids))
        chain = growing.chain()
        with self._lock:
            self._cache.add(grid, text, start, growing.kept())
        return chain

    def _boundaries(self, text: bytes, begin: int) -> list[int]:
        """Where the text behind ``begin`` is cut, in order."""
        if self._encoder.cuts is None:
            return []
        ends: list[int] = []
        previous, last = begin, begin
        for match in self._encoder.cuts.finditer(text, begin + 1):
            last = match.start()
            if last - previous >= _SEGMENT_BYTES:
                ends.append(last)
                previous = last
        if last > previous:
            ends.append(last)
        return ends


class _Growing:
    """The blocks of a text, from a known start on."""

    def __init__(self, start: Known | None, block_tokens: int, extras: BlockExtras, first_ids: Sequence[int]) -> None:
        self._block_tokens = block_tokens
        self._extras = extras
        self._rest = id_bytes(first_ids) if start is None else start.rest
        self._hashes = array("Q") if start is None else start.tokenized.hashes[: start.blocks]
        self._marks: list[tuple[int, int, bytes]] = []

    def take(self, ids: bytes) -> None:
        """Append token ids, and hash the blocks that they fill."""
        data, step, hashes = self._rest + ids, self._block_tokens * TOKEN_BYTES, self._hashes
        parent, usual, at = self._last(), self._extras.usual, self._extras.at
        for end in range(step, len(data) + 1, step):
            extra = at.get(len(hashes), usual) if at else usual
            parent = block_hash(parent, data[end - step : end], extra)
            hashes.append(parent)
        self._rest = data[len(data) // step * step :]

    def mark(self, end: int) -> None:
        """The text up to ``end`` has been taken."""
        self._marks.append((end, len(self._hashes), self._rest))

    def _last(self) -> int:
        """Hash of the last full block."""
        return self._hashes[-1] if self._hashes else ROOT

    def chain(self) -> Chain:
        hashes, rest, size = self._hashes, self._rest, self._block_tokens
        tokens = len(hashes) * size + len(rest) // TOKEN_BYTES
        tail = None
        if rest or not hashes:
            extra = self._extras.at.get(len(hashes), self._extras.usual)
            tail = block_hash(self._last(), rest, extra)
        if not hashes:
            assert tail is not None
            return Chain((tail,), size, max(1, tokens), key_stride=key_stride(size))
        return Chain(hashes, size, tokens, tail, key_stride(size))

    def kept(self) -> list[Known]:
        """The marked boundaries."""
        if not self._marks:
            return []
        tokenized = Tokenized(self._hashes[: self._marks[-1][1]])
        return [Known(end, blocks, rest, tokenized) for end, blocks, rest in self._marks]


def _seed(block_tokens: int, extras: BlockExtras, add_special_tokens: bool) -> int:
    seed = block_tokens << 1 | add_special_tokens
    if not extras.usual and not extras.at:
        return seed
    parts = [extras.usual, *(b"%d:%b" % place for place in sorted(extras.at.items()))]
    return xxhash.xxh3_64_intdigest(b"\xff".join(parts), seed)
