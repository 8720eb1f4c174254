"""The tokenizer of one pool on one replica: chains of engine blocks in place of byte blocks, if they come in time.

A short rest is tokenized at once: it costs less than to hand it over. Everything else is done by a few threads, with a
bounded queue; a request does not wait for them longer than a set time. It then has byte blocks, and the thread's result
is of use to the conversation's next turn.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from dualmap.router.prompts.inference_request import RESPONSES_PATH, SentPrompt, TokenSource
from dualmap.router.prompts.prompt import TokenizedHow
from dualmap.router.tokens.chat_template import ChatTemplate
from dualmap.router.tokens.conversation import UntokenizedError
from dualmap.router.tokens.encoder import Encoder
from dualmap.router.tokens.fast_tokenizer import Encoded
from dualmap.router.tokens.model_files import ChatTemplates
from dualmap.router.tokens.tokenized_chain import ChainMaker, Steps
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import BlockExtras

log = logging.getLogger(__name__)

AT_ONCE_TEXT_BYTES: Final = 64 << 10
"""A prompt up to this is rendered and looked up on the event loop: a fraction of a millisecond."""
AT_ONCE_PARTS: Final = 200
MAX_WAITING: Final = 64
"""Prompts that wait for a thread; one more has byte blocks at once."""


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

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | None:
        """The chain of the engine's blocks; None if it cannot be had, or not in time."""
        source = sent.source
        if source is None:
            self._count("bytes")
            return None
        extras = BlockExtras.of(lora, sent.salt)
        short = source.text_bytes <= AT_ONCE_TEXT_BYTES and source.parts <= AT_ONCE_PARTS
        try:
            if not short:
                return await self._in_thread(lambda: self._all(source, block_tokens, extras))
            steps = self._steps(source, block_tokens, extras)
            texts = next(steps)
            if sum(map(len, texts)) <= self._encoder.at_once_chars:
                return _finish(steps, self._encoder.encode(texts))
            return await self._in_thread(lambda: _finish(steps, self._encoder.encode(texts)))
        except UntokenizedError as error:
            log.debug("prompt not tokenized: %s", error)
            self._count("bytes")
            return None

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _all(self, source: TokenSource, block_tokens: int, extras: BlockExtras) -> Chain:
        steps = self._steps(source, block_tokens, extras)
        return _finish(steps, self._encoder.encode(next(steps)))

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

    def _steps(self, source: TokenSource, block_tokens: int, extras: BlockExtras) -> Steps:
        data, special = self._text(source)
        return self._maker.steps(data, block_tokens, extras, add_special_tokens=special)

    def _text(self, source: TokenSource) -> tuple[bytes, bool]:
        """The engine's input, with media up to the first message that has some, and whether the tokenizer adds special
        tokens of its own."""
        if source.path == "/v1/completions":
            body = source.body()
            text = body["prompt"]
        elif self._templates is None:
            raise UntokenizedError("the model has no chat template")
        else:
            templates = self._templates
            body = source.body(system_first=templates.system_first, unthinking_effort=templates.plain.unthinking_effort)
            template = self._templates.of(body)
            validated = source.path != RESPONSES_PATH
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

    async def _in_thread(self, work: Callable[[], Chain]) -> Chain | None:
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

    def _left(self, loop: asyncio.AbstractEventLoop) -> Callable[[Future[Chain]], None]:
        def leave() -> None:
            self._waiting -= 1

        def done(future: Future[Chain]) -> None:
            if not future.cancelled():
                future.exception()
            if not loop.is_closed():
                loop.call_soon_threadsafe(leave)

        return done


def _finish(steps: Steps, encoded: Encoded) -> Chain:
    try:
        steps.send(encoded)
    except StopIteration as end:
        chain: Chain = end.value
        return chain
    raise AssertionError("a prompt is tokenized in one step")
