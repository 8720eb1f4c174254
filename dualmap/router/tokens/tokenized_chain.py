"""Making a rendered prompt's chain of engine blocks by tokenizing no more than what is new."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Generator
from itertools import pairwise
from typing import Final

import xxhash

from dualmap.router.tokens.encoder import Encoder
from dualmap.router.tokens.fast_tokenizer import Encoded, id_bytes
from dualmap.router.tokens.prefix_cache import Known, PrefixCache, Tokenized, prefix_grid
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES, BlockExtras, append_hashes, chain_of_hashes

_SEGMENT_BYTES: Final = 1024
"""Boundaries nearer to each other than this are not kept, except for the last."""
_LAST_SEGMENT_BYTES: Final = 64
"""The last is not kept nearer than this to the one before: a message's end and the opening of the answer, usually."""

Steps = Generator[list[str], Encoded, tuple[Chain, Known | None]]


class ChainMaker:
    """Chains of one pool's prompts. Used by the event loop and by threads, one at a time at each step."""

    def __init__(self, encoder: Encoder, *, max_bytes: int) -> None:
        self._encoder = encoder
        self._first, self._last = id_bytes(encoder.first_ids), id_bytes(encoder.last_ids)
        self._cache = PrefixCache(max_bytes)
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        return self._cache.memory_bytes

    def steps(
        self, text: bytes, block_tokens: int, extras: BlockExtras, *, add_special_tokens: bool, tenant: str = "",
        until: int | None = None,
    ) -> Steps:  # fmt: skip
        """Yields the texts to tokenize (once), is sent their token ids, and returns the chain, with the state at
        ``until``, a boundary.

        Chains of a ``block_tokens``, of extras and of tenants that differ share nothing: none can find out by time what
        another one has sent.
        """
        grid = prefix_grid(text, _seed(block_tokens, extras, add_special_tokens, tenant))
        with self._lock:
            start = self._cache.find(grid, text)
        if start is None:
            begin, hashes, before = 0, array("Q"), self._first if add_special_tokens else b""
        else:
            begin, hashes, before = start.end, start.tokenized.hashes[: start.blocks], start.rest
        ends = self._boundaries(text, begin, until)
        ids, starts = yield [text[at:end].decode() for at, end in pairwise((begin, *ends, len(text)))]
        data = before + ids + self._last if add_special_tokens else before + ids
        head, ahead = len(hashes), len(before) // TOKEN_BYTES
        rest = append_hashes(hashes, data, block_tokens, extras)
        boundaries = [] if start is None else [start]
        if ends:
            tokenized = Tokenized(hashes)
            for end, place in zip(ends, starts[1:], strict=False):
                blocks, rest_tokens = divmod(ahead + place, block_tokens)
                at = blocks * block_tokens
                kept = data[at * TOKEN_BYTES : (at + rest_tokens) * TOKEN_BYTES]
                boundaries.append(Known(end, head + blocks, kept, tokenized))
            with self._lock:
                self._cache.add(grid, text, start, boundaries if start is None else boundaries[1:])
        chain = chain_of_hashes(hashes, rest, block_tokens, extras)
        return chain, next((known for known in boundaries if known.end == until), None)

    def _boundaries(self, text: bytes, begin: int, until: int | None) -> list[int]:
        """The positions at which the text behind ``begin`` is cut, in order; ``until``, where it may be, is one."""
        if self._encoder.cuts is None:
            return []
        ends: list[int] = []
        previous, last = begin, begin
        for match in self._encoder.cuts.finditer(text, begin + 1):
            last = match.start()
            if last - previous >= _SEGMENT_BYTES or last == until:
                ends.append(last)
                previous = last
        if last - previous >= _LAST_SEGMENT_BYTES:
            ends.append(last)
        return ends


def _seed(block_tokens: int, extras: BlockExtras, add_special_tokens: bool, tenant: str) -> int:
    seed = block_tokens << 1 | add_special_tokens
    if tenant:
        seed = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"), seed)
    if not extras.usual and not extras.at:
        return seed
    parts = [extras.usual, *(b"%d:%b" % place for place in sorted(extras.at.items()))]
    return xxhash.xxh3_64_intdigest(b"\xff".join(parts), seed)
