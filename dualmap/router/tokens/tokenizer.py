"""The tokenizer of one pool on one replica: chains of engine blocks in place of byte blocks, if they come in time.

A short rest is tokenized at once: it costs less than to hand it over. Everything else is done by a few threads, with a
bounded queue; a request does not wait for them longer than a set time. It then has byte blocks, and the thread's result
is of use to the conversation's next turn.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import xxhash

from dualmap.api_bodies.json_body import write_json
from dualmap.router.prompts.inference_request import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, SentPrompt, TokenSource
from dualmap.router.prompts.known_bodies import ChatEnd, ContinuedChat, HashedText, HashedTokens
from dualmap.router.prompts.prompt import TokenizedHow
from dualmap.router.tokens.chat_template import ChatTemplate
from dualmap.router.tokens.conversation import UntokenizedError
from dualmap.router.tokens.encoder import Encoder
from dualmap.router.tokens.fast_tokenizer import Encoded
from dualmap.router.tokens.model_files import ChatTemplates
from dualmap.router.tokens.request_kind import RequestKind, kind_of_messages
from dualmap.router.tokens.split_chats import SplitChats
from dualmap.router.tokens.tokenized_chain import ChainMaker
from dualmap.scheduling.prompts.blocks import KnownText
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES, BlockExtras, append_hashes, chain_of_hashes

log = logging.getLogger(__name__)

AT_ONCE_TEXT_BYTES: Final = 64 << 10
"""A prompt up to this is rendered and looked up on the event loop: a fraction of a millisecond."""
AT_ONCE_PARTS: Final = 200
MAX_WAITING: Final = 64
"""Prompts that wait for a thread; one more has byte blocks at once."""


_MAX_SPECIAL_CHARS: Final = 256

T = TypeVar("T")
Made = tuple[Chain, HashedText | None]
"""A prompt's chain, and what a longer one continues from."""


class PoolTokenizer:
    """A tokenizer by the model's files. Its result is as right as these: see ``router.tokens.verified``."""

    def __init__(
        self, encoder: Encoder, templates: ChatTemplates | None, *, threads: ThreadPoolExecutor, timeout_s: float,
        max_bytes: int, count: Callable[[TokenizedHow], None],
    ) -> None:  # fmt: skip
        """``count`` is called with the reason why a prompt has no chain; ``max_bytes`` bounds what is kept of former
        ones."""
        self._encoder = encoder
        self._templates = templates
        self._maker = ChainMaker(encoder, max_bytes=max_bytes)
        self._threads = threads
        self._timeout_s = timeout_s
        self._count = count
        self._waiting = 0
        self._identity = secrets.randbits(64)
        self._splits: dict[tuple[int, bool], SplitChats] = {}
        """By the identity of the template, and by whether chats are validated."""

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | None:
        """The chain of the engine's blocks; None if it cannot be had, or not in time."""
        source = sent.source
        if source is None:
            self._count("bytes")
            return None
        extras = BlockExtras.of(lora, sent.salt)
        keeps = sent.hashed is not None and not source.has_media and _continues(source)
        short = not keeps and source.text_bytes <= AT_ONCE_TEXT_BYTES and source.parts <= AT_ONCE_PARTS
        try:
            if not short:
                made = await self._in_thread(
                    lambda: self._all(source, block_tokens, extras, tenant=sent.tenant, keeps=keeps)
                )
            else:
                steps = self._steps(source, block_tokens, extras, tenant=sent.tenant)
                texts = next(steps)
                if sum(map(len, texts)) <= self._encoder.at_once_chars:
                    made = _finish(steps, self._encoder.encode(texts))
                else:
                    made = await self._in_thread(lambda: _finish(steps, self._encoder.encode(texts)))
        except UntokenizedError as error:
            log.debug("prompt not tokenized: %s", error)
            self._count("bytes")
            return None
        return self._made(sent, made)

    async def chain_on(
        self, sent: SentPrompt, kind: RequestKind, *, lora: str | None, block_tokens: int
    ) -> Chain | None:
        """The chain of a chat whose beginning is known, by the tokens of what is new. It is the one that ``chain``
        makes of the whole; None where that has to be made. ``kind`` is that of all its messages."""
        known, source = sent.prompt, sent.source
        extras = BlockExtras.of(lora, sent.salt)
        if not isinstance(known, ContinuedChat) or source is None or self._templates is None:
            return None
        body = _chat_of(source, self._templates, behind=True)
        begins, seed = known.begins, self._seed(block_tokens, extras, body)
        if begins.seed != seed or begins.block_bytes != block_tokens * TOKEN_BYTES:
            return None
        tail = self._splits_of(source.path, body).tail(body, known.known.end.shape)
        if tail is None or not self._may_cut(tail.text) or not self._may_cut(tail.opening):
            return None
        texts = [tail.text.removesuffix(tail.opening), tail.opening]
        end = ChatEnd(tail.shape, kind)
        at_once = len(tail.text) <= self._encoder.at_once_chars
        encoded = self._encoder.encode(texts) if at_once else await self._in_thread(lambda: self._encoder.encode(texts))
        if encoded is None:
            return None
        return self._made(sent, _continued(begins, encoded, block_tokens, extras, end))

    def _made(self, sent: SentPrompt, made: Made | None) -> Chain | None:
        """The chain. What the conversation's next turn continues from is kept."""
        if made is None:
            return None
        chain, hashed = made
        if hashed is not None and sent.hashed is not None:
            sent.hashed(hashed)
        return chain

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _all(self, source: TokenSource, block_tokens: int, extras: BlockExtras, *, tenant: str, keeps: bool) -> Made:
        steps = self._steps(source, block_tokens, extras, tenant=tenant, keeps=keeps)
        return _finish(steps, self._encoder.encode(next(steps)))

    def _splits_of(self, path: str, body: Mapping[str, Any]) -> SplitChats:
        assert self._templates is not None
        template, validated = self._templates.of(body), _is_validated(path)
        splits = self._splits.get(key := (id(template), validated))
        if splits is None:
            splits = self._splits[key] = SplitChats(template, validated=validated)
        return splits

    def _may_cut(self, text: str) -> bool:
        """Whether a text, and what stands before it, are tokenized independently."""
        cuts = self._encoder.cuts
        return cuts is not None and cuts.match(text[:_MAX_SPECIAL_CHARS].encode("utf-8", "replace")) is not None

    def _seed(self, block_tokens: int, extras: BlockExtras, body: Mapping[str, Any]) -> int:
        """The seed of chats that are known by the tokens of this tokenizer, in blocks of this kind, and with the effort
        that the template is given: bodies that differ in it alone may have the same prompt by bytes."""
        effort = write_json(body.get("reasoning_effort"))
        parts = [effort, extras.usual, *(b"%d:%b" % place for place in sorted(extras.at.items()))]
        return xxhash.xxh3_64_intdigest(b"%d %b" % (block_tokens, b"\xff".join(parts)), self._identity)

    async def ids(self, source: TokenSource) -> array[int] | None:
        """The token ids of a prompt without media, as long as it takes; None if they cannot be computed."""
        try:
            return await asyncio.wrap_future(self._threads.submit(self._ids, source))
        except UntokenizedError:
            return None

    def _ids(self, source: TokenSource) -> array[int]:
        data, special = self._text(source)
        ids, _ = self._encoder.encode([data.decode()])
        first, last = (self._encoder.first_ids, self._encoder.last_ids) if special else ((), ())
        return array("I", first) + array("I", ids) + array("I", last)

    def _steps(
        self, source: TokenSource, block_tokens: int, extras: BlockExtras, *, tenant: str, keeps: bool = False
    ) -> Generator[list[str], Encoded, Made]:
        """The steps of ``ChainMaker``. With ``keeps`` they also find the place from which a longer chat
        continues."""
        data, special = self._text(source)
        split, until, seed = None, None, 0
        if keeps and not (special and self._encoder.last_ids) and self._templates is not None:
            body = _chat_of(source, self._templates)
            split = self._splits_of(source.path, body).opening(body, tenant=tenant)
            seed = self._seed(block_tokens, extras, body)
        if split is not None and data.endswith(opening := split[1].encode()) and self._may_cut(split[1]):
            until = len(data) - len(opening)
        made = self._maker.steps(data, block_tokens, extras, add_special_tokens=special, tenant=tenant, until=until)
        chain, known = yield from made
        if known is None or split is None:
            return chain, None
        tokens = HashedTokens(
            known.blocks * block_tokens * TOKEN_BYTES + len(known.rest), ChatEnd(split[0], kind_of_messages(source))
        )
        before = known.blocks * block_tokens * TOKEN_BYTES
        return chain, HashedText(seed, block_tokens * TOKEN_BYTES, chain.hashes, before, known.rest, tokens)

    def _text(self, source: TokenSource) -> tuple[bytes, bool]:
        """The engine's input, with media up to the first message that has some, and whether the tokenizer adds special
        tokens of its own."""
        if source.path == "/v1/completions":
            body = source.body()
            text = body["prompt"]
        elif self._templates is None:
            raise UntokenizedError("the model has no chat template")
        else:
            body = _chat_of(source, self._templates)
            template = self._templates.of(body)
            validated = _is_validated(source.path)
            if source.has_media:
                text = self._head(template, body, validated=validated)
            else:
                text = template.render(body, validated=validated)
        special = body.get("add_special_tokens", source.adds_special_tokens)
        if source.has_media and special and self._encoder.last_ids:
            raise UntokenizedError("the tokenizer puts tokens of its own behind a text")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UntokenizedError("the prompt has a lone surrogate") from error
        return data, bool(special)

    def _head(self, template: ChatTemplate, body: Mapping[str, Any], *, validated: bool) -> str:
        """The text before the first message with media. It must end where tokens end whatever follows."""
        head, rest = template.render_head(body, validated=validated)
        cuts = self._encoder.cuts
        if cuts is None or cuts.match(rest.encode("utf-8", "surrogatepass")) is None:
            raise UntokenizedError("the message with media does not begin with a special token")
        return head

    async def _in_thread(self, work: Callable[[], T]) -> T | None:
        if self._waiting >= MAX_WAITING:
            self._count("busy")
            return None
        self._waiting += 1
        running = self._threads.submit(work)
        running.add_done_callback(self._left(asyncio.get_running_loop()))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(asyncio.wrap_future(running))
        except TimeoutError:
            self._count("late")
            return None

    def _left(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[T]], None]:
        def leave() -> None:
            self._waiting -= 1

        def done(future: Future[T]) -> None:
            if not future.cancelled():
                future.exception()
            if not loop.is_closed():
                loop.call_soon_threadsafe(leave)

        return done


def _chat_of(source: TokenSource, templates: ChatTemplates, *, behind: bool = False) -> Mapping[str, Any]:
    """The chat of a request, as the engine makes it for these templates; ``behind``: of messages behind others."""
    effort = templates.plain.unthinking_effort
    return source.body(system_first=templates.system_first, unthinking_effort=effort, behind=behind)


def _is_validated(path: str) -> bool:
    """See ``template_input``."""
    return path != RESPONSES_PATH


def _continues(source: TokenSource) -> bool:
    """Whether messages behind those of the request may make the same chat alone as they would behind these."""
    if source.path == MESSAGES_PATH:  # a later system message may change tools, or go to the first
        return not any(message["role"] == "system" for message in source.fields["messages"])
    return source.path in (CHAT_PATH, RESPONSES_PATH)


def _finish(steps: Generator[list[str], Encoded, Made], encoded: Encoded) -> Made:
    try:
        steps.send(encoded)
    except StopIteration as end:
        made: Made = end.value
        return made
    raise AssertionError("a prompt is tokenized in one step")


def _continued(begins: KnownText, encoded: Encoded, block_tokens: int, extras: BlockExtras, end: ChatEnd) -> Made:
    """The chain of what was known and of two more texts, and the state between these."""
    ids, starts = encoded
    hashes, data = begins.hashes[: begins.blocks], begins.rest + ids
    rest = append_hashes(hashes, data, block_tokens, extras)
    tokens = HashedTokens(begins.size + starts[1] * TOKEN_BYTES, end)
    before = begins.blocks * begins.block_bytes
    hashed = HashedText(begins.seed, begins.block_bytes, hashes, before, data, tokens)
    return chain_of_hashes(hashes, rest, block_tokens, extras), hashed
