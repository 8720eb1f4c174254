"""Cutting prompts into blocks: text and trace records become hash chains; ``engine_blocks`` makes those of token ids.

``hash_k = xxh3_64(block k, seed = hash_(k-1))``: each hash covers its block and, through the seed, everything
before it. The first seed holds what separates KV caches in vLLM although the prompt is the same: the model, the
LoRA adapter, the cache salt.

Text is cut every ``block_bytes`` bytes of its UTF-8 rendering, a number that follows from the configuration
alone: all replicas always cut the same way. What the fleet learns (bytes per token) only changes how many tokens a
block is believed to hold.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass

import xxhash

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import NO_EXTRAS, BlockExtras, engine_chain, engine_chain_in_steps
from dualmap.scheduling.prompts.hashes import Hashed, prefix_hashes
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.values import record, value

DEFAULT_BYTES_PER_TOKEN = 4.0
"""The prior of a pool; the leader learns its own."""

_STEP_BLOCKS = 2048
"""Blocks hashed in one step of a long prompt: well under a millisecond's work for blocks of usual length."""
_UNCACHED_SEED = 1
_SEPARATOR = b"\xff"
"""Never part of UTF-8, so parts of a seed cannot run into each other."""


IMAGE_MARK_BYTES = 32
"""The end of an image's mark in a prompt's bytes: a hash of what identifies it."""

Piece = bytes | str
"""A piece of a text: in UTF-8, or yet to be encoded."""


@record
class TextPrompt:
    """A prompt as bytes: equal leading bytes mean equal leading tokens.

    It is made of pieces, which become bytes when these are first read: not at all where a tokenizer answers.
    """

    given: bytes | Sequence[Piece]
    """Its bytes, or its pieces before they were read."""
    media_at: int | None = None
    """Offset in ``data`` of the first message with images, sound or other parts; None without any. ``data`` holds
    hashes of these, so its length says nothing about its tokens."""
    image_ends: Sequence[int] = ()
    """Offsets in ``data`` at which the mark of each image ends, in order."""
    other_media: bool = False
    """Whether there are parts that are neither text nor image."""
    unread: bool = False
    """Whether there are parts of an unknown form, so that the engine's token count cannot be predicted."""
    _: KW_ONLY
    measured: int | None = None
    """Bytes of the pieces, once these are measured."""

    @property
    def data(self) -> bytes:
        given = self.given
        if not isinstance(given, bytes):
            given = self.given = joined(given)
        return given

    @property
    def size(self) -> int:
        """Bytes of ``data``."""
        if isinstance(self.given, bytes):
            return len(self.given)
        if self.measured is None:
            self.measured = size_of(self.given)
        return self.measured

    @property
    def pieces(self) -> Sequence[Piece]:
        """Those that it is made of, before its bytes were read."""
        return () if isinstance(self.given, bytes) else self.given

    @property
    def is_empty(self) -> bool:
        return not (self.given if isinstance(self.given, bytes) else any(self.given))

    @property
    def has_media(self) -> bool:
        return self.media_at is not None

    @property
    def image_marks(self) -> tuple[bytes, ...]:
        """The mark of each image, in order: equal for equal images, in all APIs."""
        return tuple(self.data[end - IMAGE_MARK_BYTES : end] for end in self.image_ends)

    def _fields(self) -> tuple[bytes, int | None, Sequence[int], bool, bool]:
        return self.data, self.media_at, self.image_ends, self.other_media, self.unread

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextPrompt) and self._fields() == other._fields()

    def __repr__(self) -> str:
        return f"TextPrompt{self._fields()}"


def joined(pieces: Sequence[Piece]) -> bytes:
    try:
        return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])
    except UnicodeEncodeError:  # a lone surrogate: legal in JSON, not in UTF-8
        return b"".join(map(_encoded, pieces))


def size_of(pieces: Sequence[Piece]) -> int:
    """Bytes of the pieces, joined."""
    return sum([len(piece if isinstance(piece, bytes) or piece.isascii() else _encoded(piece)) for piece in pieces])


def _encoded(piece: Piece) -> bytes:
    return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece


@value
class TokenPrompt:
    """A prompt as token ids (unsigned 32 bit each)."""

    token_ids: array[int]


@value
class KnownText:
    """The beginning of a text, of which the hashes of its full blocks are known, and the bytes behind the last one."""

    seed: int
    block_bytes: int
    hashes: array[int]
    """They may be more."""
    blocks: int
    """The number of full blocks, one at least."""
    rest: bytes
    """The bytes behind them: fewer than a block has."""

    @property
    def size(self) -> int:
        return self.blocks * self.block_bytes + len(self.rest)


class ContinuedText:
    """A text without media, whose beginning is known."""

    __slots__ = ("begins", "data")

    def __init__(self, begins: KnownText, pieces: Sequence[Piece]) -> None:
        self.begins = begins
        self.data = begins.rest + joined(pieces)
        """The bytes of the text behind the known blocks."""

    @property
    def size(self) -> int:
        """Bytes of the text."""
        return self.begins.blocks * self.begins.block_bytes + len(self.data)


Prompt = TextPrompt | TokenPrompt
SentText = TextPrompt | ContinuedText


_FILLER = b"\xfd"
"""Never part of UTF-8."""
_MAX_FILLER_BYTES = 1 << 20


def with_images(prompt: TextPrompt, image_tokens: float, bytes_per_token: float) -> TextPrompt:
    """The prompt with as many bytes behind the mark of each image as its tokens would have as text, so that it counts,
    and is cut, like any other. Images beyond a megabyte of these, more than contexts hold, count as their marks."""
    filler = _FILLER * round(image_tokens * bytes_per_token)
    if not filler or not prompt.image_ends:
        return prompt
    ends = prompt.image_ends[: _MAX_FILLER_BYTES // len(filler)]
    pieces: list[bytes] = []
    at = 0
    for end in ends:
        pieces += (prompt.data[at:end], filler)
        at = end
    pieces.append(prompt.data[at:])
    return TextPrompt(b"".join(pieces), prompt.media_at)


def cache_seed(model: str, lora: str | None = None, cache_salt: str | None = None) -> int:
    """The seed of a chain's first block: requests that differ in any part share no KV cache.

    ``model`` is the name the instances serve, not the alias a client used: aliases share a cache.
    """
    parts = (model, lora or "", cache_salt or "")
    return xxhash.xxh3_64_intdigest(_SEPARATOR.join(part.encode("utf-8", "surrogatepass") for part in parts))


@dataclass(frozen=True, slots=True)
class BlockRule:
    """How prompts are cut; equal on every replica of a pool."""

    block_tokens: int = 128
    block_bytes: int = 512
    engine_block_tokens: int | None = None
    """Size of blocks of token ids, as the instances report it; None: ``block_tokens``."""

    @property
    def token_block_tokens(self) -> int:
        """Tokens in a block of token ids."""
        return self.engine_block_tokens or self.block_tokens

    @classmethod
    def of(cls, settings: SchedulingSettings) -> BlockRule:
        return cls(settings.block_tokens, max(1, round(settings.block_tokens * DEFAULT_BYTES_PER_TOKEN)))

    def chain(self, prompt: Prompt, seed: int, bytes_per_token: float, extras: BlockExtras = NO_EXTRAS) -> Chain:
        """The chain of a prompt. Text depends on ``seed``, and ``bytes_per_token`` (learned) scales its tokens; tokens
        become the engine's blocks, which depend on ``extras``."""
        if isinstance(prompt, TokenPrompt):
            return engine_chain(prompt.token_ids, self.token_block_tokens, extras)
        return self.text_chain(prompt.data, seed, bytes_per_token)

    def text_chain(self, data: bytes, seed: int, bytes_per_token: float) -> Chain:
        """The chain of a text, made at once."""
        size = self.block_bytes
        hashes, tail = prefix_hashes(data, seed, size)
        # ``_text_chain`` written out: most requests make one.
        return Chain(hashes, round(size / bytes_per_token) or 1, round(len(data) / bytes_per_token) or 1, tail)

    def goes_on(self, begins: KnownText, seed: int) -> bool:
        """Whether the blocks of a text's beginning are those of this rule and seed."""
        return begins.seed == seed and begins.block_bytes == self.block_bytes

    def continued(self, text: ContinuedText, bytes_per_token: float) -> Chain:
        """The chain of a text whose beginning ``goes_on``: equal to that of the whole text."""
        begins, block_bytes = text.begins, self.block_bytes
        known = begins.hashes[: begins.blocks]
        more, tail = prefix_hashes(text.data, known[-1], block_bytes)
        hashed: Hashed = (*known, *more), tail
        if len(text.data) < block_bytes:  # they fill no block, and are no prompt of their own
            hashed = tuple(known), more[0] if text.data else None
        return _text_chain(hashed, text.size, block_bytes, bytes_per_token)

    def chain_in_steps(
        self, prompt: Prompt, seed: int, bytes_per_token: float, extras: BlockExtras = NO_EXTRAS
    ) -> Generator[None, None, Chain]:
        """Make the chain in steps of about a millisecond: the caller may do other work in between."""
        if isinstance(prompt, TokenPrompt):
            return (yield from engine_chain_in_steps(prompt.token_ids, self.token_block_tokens, extras))
        hashed = yield from _hash_in_steps(prompt.data, seed, self.block_bytes)
        return _text_chain(hashed, len(prompt.data), self.block_bytes, bytes_per_token)


def continued_chain(head: Chain, rest: bytes, bytes_per_token: float) -> Chain:
    """The chain of a prompt whose beginning is known as engine blocks, and whose rest, with media in it, is not.

    What an engine calls the blocks of the rest cannot be computed: what identifies a medium there, and how many tokens
    it has, depends on the model's processor. These blocks are named after the bytes, a block being as many as its
    tokens have on average; they are found again by what placements booked, and no KV event confirms them.
    """
    size = head.block_tokens
    known = head.hashes[: head.prompt_tokens // size]
    parent = head.hashes[-1] if head.tail_hash is None else head.tail_hash
    seed = xxhash.xxh3_64_intdigest(_SEPARATOR, parent)
    block_bytes = max(1, round(size * DEFAULT_BYTES_PER_TOKEN))
    hashes, tail = prefix_hashes(rest, seed, block_bytes)
    tokens = head.prompt_tokens + max(1, round(len(rest) / bytes_per_token))
    if known and len(rest) < block_bytes:  # no full block
        return Chain(tuple(known), size, tokens, hashes[-1], head.key_stride)
    return Chain((*known, *hashes), size, tokens, tail, head.key_stride)


def uncached_chain(prompt: Prompt, bytes_per_token: float) -> Chain:
    """The chain of a prompt that only counts: one block, which no cache ever has."""
    if isinstance(prompt, TokenPrompt):
        data, tokens = prompt.token_ids.tobytes(), len(prompt.token_ids)
    else:
        data, tokens = prompt.data, round(len(prompt.data) / bytes_per_token)
    tokens = max(1, tokens)
    return Chain((xxhash.xxh3_64_intdigest(data, _UNCACHED_SEED),), tokens, tokens)


def uncached(chain: Chain) -> Chain:
    """The chain of a prompt of which its engine has another part: it only counts."""
    tokens = chain.prompt_tokens
    return Chain((xxhash.xxh3_64_intdigest(array("Q", chain.hashes).tobytes(), _UNCACHED_SEED),), tokens, tokens)


def chain_of_trace(hash_ids: Sequence[int], prompt_tokens: int, seed: int, block_tokens: int = 512) -> Chain:
    """The chain of a trace record, whose ``hash_ids`` name its blocks and may end with a partial one."""
    hashes, parent = [], seed
    for hash_id in hash_ids:
        parent = xxhash.xxh3_64_intdigest(hash_id.to_bytes(8, "big", signed=True), parent)
        hashes.append(parent)
    full_blocks = max(1, prompt_tokens // block_tokens)
    tail_hash = hashes[full_blocks] if len(hashes) > full_blocks else None
    return Chain(tuple(hashes[:full_blocks]), block_tokens, max(1, prompt_tokens), tail_hash)


def _text_chain(hashed: Hashed, text_bytes: int, block_bytes: int, bytes_per_token: float) -> Chain:
    block_tokens, tokens = round(block_bytes / bytes_per_token), round(text_bytes / bytes_per_token)
    return Chain(hashed[0], block_tokens or 1, tokens or 1, hashed[1])


def _hash_in_steps(data: bytes, seed: int, block_bytes: int) -> Generator[None, None, Hashed]:
    step_bytes = _STEP_BLOCKS * block_bytes
    hashes: list[int] = []
    parent, tail_hash = seed, None
    for start in range(0, max(1, len(data)), step_bytes):
        if hashes:
            yield
        step_hashes, tail_hash = prefix_hashes(data[start : start + step_bytes], parent, block_bytes)
        if hashes and len(data) - start < block_bytes:  # a rest that is alone in its step is no block
            return tuple(hashes), step_hashes[0]
        hashes += step_hashes
        parent = hashes[-1]
    return tuple(hashes), tail_hash
