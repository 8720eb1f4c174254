"""Hashes of blocks: in C where that is built (``hashes.c``), else in Python, which is the reference of the other."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import xxhash

Hashed = tuple[tuple[int, ...], int | None]
"""Hashes of the full blocks, and of what follows them."""


def hashes_in_python(data: bytes | memoryview, seed: int, block_bytes: int) -> Hashed:
    """The hashes of a text's blocks, each with the one before it as the seed. A text shorter than one block is its one
    block."""
    digest, parent = xxhash.xxh3_64_intdigest, seed
    full_bytes = len(data) - len(data) % block_bytes
    if not full_bytes:
        return (digest(data, parent),), None
    hashes = []
    for (block,) in struct.iter_unpack(f"{block_bytes}s", memoryview(data)[:full_bytes]):
        parent = digest(block, parent)
        hashes.append(parent)
    return tuple(hashes), digest(data[full_bytes:], parent) if full_bytes < len(data) else None


def _load() -> ModuleType | None:
    try:
        from dualmap.scheduling.prompts import _hashes
    except ImportError:
        return None
    return _hashes


NATIVE: Final[Any] = _load()
"""The extension; None where it is not built."""

prefix_hashes: Final[Callable[[bytes | memoryview, int, int], Hashed]] = (
    hashes_in_python if NATIVE is None else NATIVE.prefix_hashes
)
"""The hashes of a text's blocks; see ``hashes_in_python``."""
