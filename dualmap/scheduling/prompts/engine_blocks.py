"""The engine's own blocks: one hash for a prompt's block and for the block that an engine reports.

vLLM's prefix cache knows full blocks of ``block_tokens`` tokens. What identifies a block there: the block before it,
its token ids, and *extra keys*, a short tuple: the LoRA adapter's name in every block, then ``(identifier, offset)`` of
each image or sound in the block, then the cache salt in the first block, then digests of prompt embeddings. The offset
is that of the medium's first token, seen from the first of the block: negative where the medium began before it. vLLM
hashes these by an algorithm of its own, which differs by version and by ``--prefix-caching-hash-algo``: its hashes are
names, no more than that. The fleet hashes the same contents itself:

    hash_k = xxh3_64(token ids of block k, 32 bits each, little-endian, then its encoded extra keys; seed = hash_(k-1))

with ``ROOT`` as the seed of the first block. Both sides of the fleet end at the same hashes:

- A router that has a prompt's token ids (given as such, or by a tokenizer) makes its chain by ``engine_chain``.
- A worker that reads an engine's KV events, which name token ids, extra keys and the parent of each stored block,
  translates each by ``block_hash`` (``statestore``'s and ``workers``' KV events).

Chains of text cut by bytes (``scheduling.prompts.blocks``) cannot be compared with these, and never equal them.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import field
from struct import iter_unpack
from typing import Any, Final

import orjson
import xxhash

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.hashes import prefix_hashes
from dualmap.scheduling.values import value

ROOT: Final = xxhash.xxh3_64_intdigest(b"engine blocks")
"""The parent of a first block."""

TOKEN_BYTES: Final = 4
_STEP_BLOCKS: Final = 2048
_KEY_BLOCK_TOKENS: Final = 128
_EXTRA: Final = b"\xff"


def key_stride(block_tokens: int) -> int:
    """Engine blocks in one key block: as many as make 128 tokens, as blocks of text have, or one."""
    return max(1, _KEY_BLOCK_TOKENS // block_tokens)


def encode_extra_keys(keys: Sequence[Any] | None) -> bytes:
    """Extra keys of one block as part of what is hashed; empty for a block without any.

    ``keys`` are in the order of the module's text: strings, (string, offset) pairs and bytes.
    """
    if not keys:
        return b""
    try:
        return _EXTRA + orjson.dumps(keys, default=_hex)
    except TypeError:  # a lone surrogate: no engine reports a block with one
        return _EXTRA + json.dumps(keys, default=_hex).encode()


def renamed_adapter(encoded: bytes, name: str, other: str) -> bytes:
    """Encoded extra keys that begin with the name of an adapter, with another one in its place."""
    begins = encode_extra_keys([name])[:-1]
    return encode_extra_keys([other])[:-1] + encoded[len(begins) :] if encoded.startswith(begins) else encoded


def decode_extra_keys(extra: bytes) -> list[Any]:
    """The keys that ``encode_extra_keys`` encoded: pairs as lists, bytes as their hexadecimal digits."""
    return list(orjson.loads(extra[len(_EXTRA) :])) if extra else []


def _hex(digest: Any) -> str:
    return bytes(digest).hex()


def block_hash(parent: int, token_bytes: bytes, extra: bytes = b"") -> int:
    """The hash of a full block: ``parent`` is that of the block before it or ``ROOT``, ``token_bytes`` its token ids as
    unsigned 32-bit numbers, ``extra`` its encoded extra keys."""
    return xxhash.xxh3_64_intdigest(token_bytes + extra if extra else token_bytes, parent)


@value
class Medium:
    """An image in a prompt of token ids."""

    identifier: str
    """The engine's name of its content."""
    offset: int
    """Tokens before its own."""
    length: int
    """Its own tokens."""


@value
class BlockExtras:
    """Encoded extra keys of the blocks of one prompt."""

    usual: bytes = b""
    """Extra keys of every block that ``at`` does not list."""
    at: Mapping[int, bytes] = field(default_factory=dict)
    """Extra keys by the block's place in the prompt, from 0."""

    @classmethod
    def of(cls, lora: str | None = None, cache_salt: str | None = None) -> BlockExtras:
        """The extra keys of a prompt without media."""
        if not lora and not cache_salt:
            return NO_EXTRAS
        names = [lora] if lora else []
        usual = encode_extra_keys(names)
        return cls(usual, {0: encode_extra_keys([*names, cache_salt])} if cache_salt else {})

    @classmethod
    def of_media(
        cls, media: Sequence[Medium], block_tokens: int, lora: str | None = None, cache_salt: str | None = None
    ) -> BlockExtras:
        """The extra keys of a prompt with these media, in their order."""
        names = [lora] if lora else []
        keys: dict[int, list[Any]] = {0: [*names]} if cache_salt else {}
        for medium in media:
            last = medium.offset + medium.length - 1
            for place in range(medium.offset // block_tokens, last // block_tokens + 1):
                keys.setdefault(place, [*names]).append((medium.identifier, medium.offset - place * block_tokens))
        if cache_salt:
            keys[0].append(cache_salt)
        return cls(encode_extra_keys(names), {place: encode_extra_keys(each) for place, each in keys.items()})


NO_EXTRAS: Final = BlockExtras()


def engine_chain(token_ids: Sequence[int], block_tokens: int, extras: BlockExtras = NO_EXTRAS) -> Chain:
    """The chain of a prompt's token ids, in the engine's blocks.

    Raises:
        OverflowError, TypeError: an id is not an unsigned 32-bit number.
    """
    steps = engine_chain_in_steps(token_ids, block_tokens, extras)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            chain: Chain = done.value
            return chain


def engine_chain_in_steps(
    token_ids: Sequence[int], block_tokens: int, extras: BlockExtras = NO_EXTRAS
) -> Generator[None, None, Chain]:
    """Make the chain in steps of about a millisecond: the caller may do other work in between."""
    data = (token_ids if isinstance(token_ids, array) else array("I", token_ids)).tobytes()
    size = block_tokens * TOKEN_BYTES
    step_bytes = _STEP_BLOCKS * size
    hashes, rest = array("Q"), b""
    for first in range(0, len(data), step_bytes):
        if first and len(data) - first >= size:
            yield
        rest = append_hashes(hashes, data[first : first + step_bytes], block_tokens, extras)
    return chain_of_hashes(hashes, rest, block_tokens, extras)


def append_hashes(hashes: array[int], token_bytes: bytes, block_tokens: int, extras: BlockExtras = NO_EXTRAS) -> bytes:
    """Append to the hashes of a prompt's blocks those of the blocks that more tokens of it fill. Returns the tokens, as
    bytes, that fill none."""
    size = block_tokens * TOKEN_BYTES
    end = len(token_bytes) // size * size
    parent = hashes[-1] if hashes else ROOT
    if extras.usual or extras.at:
        digest, usual, at = xxhash.xxh3_64_intdigest, extras.usual, extras.at
        # ``block_hash`` written out, in one expression: a long prompt has thousands of blocks.
        numbered = enumerate(iter_unpack(f"{size}s", token_bytes[:end]), len(hashes))
        hashes.fromlist([parent := digest(block + at.get(place, usual), parent) for place, (block,) in numbered])
    elif end:
        hashes.extend(prefix_hashes(memoryview(token_bytes)[:end], parent, size)[0])
    return token_bytes[end:]


def chain_of_hashes(hashes: array[int], rest: bytes, block_tokens: int, extras: BlockExtras = NO_EXTRAS) -> Chain:
    """The chain of a prompt's full blocks and of the tokens, as bytes, that follow them."""
    tokens = max(1, len(hashes) * block_tokens + len(rest) // TOKEN_BYTES)
    stride, tail = key_stride(block_tokens), None
    if rest or not hashes:
        tail = block_hash(hashes[-1] if hashes else ROOT, rest, extras.at.get(len(hashes), extras.usual))
    if not hashes:
        assert tail is not None
        return Chain((tail,), block_tokens, tokens, key_stride=stride)
    return Chain(hashes, block_tokens, tokens, tail, stride)
