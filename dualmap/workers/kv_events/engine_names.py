"""vLLM's own names of blocks, computed from token ids.

With its default algorithm vLLM 0.32 and 0.33 name blocks alike in every process with the same ``PYTHONHASHSEED``: each
*unit* of a prompt, a divisor of all its cache groups' block sizes, has the SHA-256 of the pickled triple of the hash of
the unit before it, its token ids and its extra keys. A block has the hash of the unit that ends it, of which events
have the low 64 bits. The keys of adapters have a path that no event has, and those of images a length; so only names
of prompts without either are computed.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from typing import Final

from dualmap.scheduling.prompts.engine_blocks import decode_extra_keys

_PROTOCOL: Final = 5
_SEEDS: Final = ("vllm-none-hash", "0")
"""The seeds without ``PYTHONHASHSEED``, and as vLLM's guides set it where engines share blocks."""


def root_hashes(seed: str | None = None) -> Sequence[bytes]:
    """The hashes that may be before a prompt's first unit: without ``PYTHONHASHSEED``, with 0, and with this one."""
    seeds = _SEEDS if seed is None else (*_SEEDS, seed)
    return tuple([hashlib.sha256(pickle.dumps(each, _PROTOCOL)).digest() for each in seeds])


ROOT_HASHES: Final = root_hashes()


def unit_hashes(
    before: bytes, token_bytes: bytes, unit_tokens: int, extra: bytes = b"", *, begins: bool = False
) -> Sequence[bytes]:
    """The hashes of the units that the token ids of a block fill, or none where its encoded extra keys are more than a
    salt where the prompt ``begins``."""
    keys = None
    if extra:
        keys = _salted(extra) if begins else None
        if keys is None:
            return ()
    ids = memoryview(token_bytes).cast("I").tolist()
    hashes = []
    for first in range(0, len(ids) - unit_tokens + 1, unit_tokens):
        unit = (before, tuple(ids[first : first + unit_tokens]), keys)
        before = hashlib.sha256(pickle.dumps(unit, _PROTOCOL)).digest()
        hashes.append(before)
        keys = None
    return hashes


def name_of(block_hash: bytes) -> int:
    """The name that events have of a block with this hash."""
    return int.from_bytes(block_hash[-8:], "big")


def _salted(extra: bytes) -> tuple[tuple[str, str]] | None:
    """The keys of a unit with a salt alone, as the engine hashes them. An adapter's name looks the same: the name that
    follows is then none of the engine's."""
    keys = decode_extra_keys(extra)
    return (("cache_salt", keys[0]),) if len(keys) == 1 and isinstance(keys[0], str) else None
