"""Writing live traffic as a trace: lengths, times and block hashes in Mooncake's format; no text.

Every line carries ``block_tokens`` too, so that a recording explains itself; other readers of the format ignore it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import BinaryIO

import orjson

from scheduling.chain import Chain

MAX_KNOWN_BLOCKS = 1_000_000


class TraceRecorder:
    """Writes one line a request, in order of arrival. Not thread-safe; the file stays the caller's.

    Block hashes become small numbers in order of appearance, so a recording says which prefixes were shared and
    nothing about what they were. The latest ``max_known_blocks`` of them are remembered; one that comes back
    after that counts as new.
    """

    def __init__(self, file: BinaryIO, *, max_known_blocks: int = MAX_KNOWN_BLOCKS) -> None:
        self._file = file
        self._numbers: OrderedDict[int, int] = OrderedDict()
        self._next_number = 0
        self._max_known_blocks = max_known_blocks
        self._start_ms: int | None = None
        self._last_ms = 0

    def write(self, at_ms: int, chain: Chain, output_tokens: int) -> None:
        """Append one request that arrived at ``at_ms``; earlier than the one before counts as with it.

        Raises:
            OSError: the file cannot be written.
        """
        if self._start_ms is None:
            self._start_ms = self._last_ms = at_ms
        self._last_ms = max(self._last_ms, at_ms)
        row = {
            "timestamp": self._last_ms - self._start_ms,
            "input_length": chain.prompt_tokens,
            "output_length": max(0, output_tokens),
            "hash_ids": self._block_numbers(chain),
            "block_tokens": chain.block_tokens,
        }
        self._file.write(orjson.dumps(row) + b"\n")

    def _block_numbers(self, chain: Chain) -> list[int]:
        """One number a block of the prompt: known ones for its hashes, new ones for what has no hash.

        A chain of text counts its blocks in bytes; its tokens may make it one block more or less.
        """
        blocks = -(-chain.prompt_tokens // chain.block_tokens)
        numbers = [self._number(block_hash) for block_hash in chain.hashes[:blocks]]
        while len(numbers) < blocks:
            numbers.append(self._mint())
        while len(self._numbers) > self._max_known_blocks:
            self._numbers.popitem(last=False)
        return numbers

    def _number(self, block_hash: int) -> int:
        known = self._numbers
        if block_hash not in known:
            known[block_hash] = self._mint()
        known.move_to_end(block_hash)
        return known[block_hash]

    def _mint(self) -> int:
        self._next_number += 1
        return self._next_number - 1
