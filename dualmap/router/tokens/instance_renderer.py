"""Prompts with images as an instance renders them, by its ``/v1/chat/completions/render``.

An image is sent there once: its tokens are kept by the hash of what identifies it, and stand in every later prompt that
has it. The question is made beside the request, which waits for the answer for a set time; a late answer serves the
next prompt with these images.

vLLM renders with ``--enable-scale-out`` alone. Where no instance does, or not in time, images count as many tokens as
they have on average, and the blocks from the first one on are named after bytes (``Unrendered`` says why).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final, TypeVar

from dualmap.router.kept import Kept
from dualmap.router.prompts.inference_request import SentPrompt
from dualmap.router.prompts.prompt import Unrendered
from dualmap.router.tokens.instance_client import (
    MAX_WAITING,
    InstanceClient,
    LateAnswerError,
    TokenizeError,
    Waiting,
)
from dualmap.router.tokens.rendered_prompt import (
    RENDER_PATH,
    ImageTokens,
    RenderedPrompt,
    RenderQuestion,
    UnrenderedError,
    read_rendered,
    two_stand_ins,
)
from dualmap.runtime.clock import Clock
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import TextPrompt
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.registered_adapters import model_of
from dualmap.scheduling.state.view import ClusterView

log = logging.getLogger(__name__)

T = TypeVar("T")

MIN_TOKENS: Final = 256
"""Estimated tokens from the first message with an image on. Of fewer, an estimate costs less than the question."""
MAX_TEXT_BYTES: Final = 1 << 20
MAX_WAITING_BYTES: Final = 80 << 20
"""Bytes of the images of prompts that wait, which outlive their requests."""
RETRY_S: Final = 60.0
"""Time before the next question to an instance that does not render, or with an image of a prompt that it refused."""
LATE_IN_ROW: Final = 3
"""Renderings that come too late, one after the other, after which no request waits for one for ``RETRY_S``."""
_IN_THREAD_BYTES: Final = 64 << 10
"""A body or an answer beyond this is made, or read, in a thread: it takes milliseconds."""


MAX_TENANTS: Final = 4096
"""Tenants whose renderings' lateness is remembered."""


class _Patience:
    """Whether requests of a tenant wait for renderings: not while these come too late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late_in_row = 0
        self._not_before_s = 0.0

    @property
    def waits(self) -> bool:
        return self._clock.monotonic_s() >= self._not_before_s

    def in_time(self) -> None:
        self._late_in_row = 0

    def late(self) -> None:
        self._late_in_row += 1
        if self._late_in_row >= LATE_IN_ROW:
            self._not_before_s = self._clock.monotonic_s() + RETRY_S


class InstanceRenderer:
    """The renderer of one pool's instances, on one replica."""

    def __init__(
        self, model: str, view: Callable[[], ClusterView], learned: Callable[[], Learned], client: InstanceClient, *,
        clock: Clock, timeout_s: float, max_bytes: int,
    ) -> None:  # fmt: skip
        """``max_bytes`` bounds what is kept of images and of prompts, together."""
        self._model = model
        self._view = view
        self._learned = learned
        self._client = client
        self._clock = clock
        self.timeout_s = timeout_s
        """The longest time that a request waits."""
        self._prompts: Kept[int, RenderedPrompt] = Kept(max_bytes // 2)
        self._images: Kept[int, ImageTokens] = Kept(max_bytes // 2)
        self._refused: Kept[int, float] = Kept(MAX_WAITING * MAX_WAITING)
        """The times until which images of refused prompts are not sent again; each counts as one."""
        self._pending: dict[int, asyncio.Task[RenderedPrompt | Unrendered]] = {}
        self._waiting = Waiting()
        self._asked_for: dict[int, asyncio.Event] = {}
        """Images that a question under way has."""
        self._numbers: bool | None = None
        """Whether the model numbers images; None: no instance has shown it yet."""
        self._patience: Kept[tuple[str, bool], _Patience] = Kept(2 * MAX_TENANTS)
        """The patience for each tenant, and for prompts without and with an unknown image: the latter take longer. Each
        counts as one."""
        self._not_before_s: dict[str, float] = {}
        """The times before which instances are not asked, by URL."""

    @property
    def memory_bytes(self) -> int:
        return self._prompts.memory_bytes + self._images.memory_bytes

    @property
    def waiting(self) -> int:
        """Prompts that are being rendered, or are to be."""
        return len(self._pending)

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | Unrendered:
        """The chain of the engine's blocks of a prompt with images."""
        source = sent.source
        if source is None or source.prompt.other_media:
            return Unrendered.OTHER_MEDIA
        if not self._pays(source.prompt):
            return Unrendered.SMALL
        if source.text_bytes > MAX_TEXT_BYTES:
            return Unrendered.REFUSED
        model = model_of(lora) if lora else self._model
        try:
            question = RenderQuestion(source, model, numbered=self._numbers is True, tenant=sent.tenant)
        except UnrenderedError as error:
            log.debug("prompt not rendered: %s", error)
            return Unrendered.REFUSED
        prompt = self._prompts.get(question.key) or await self._await(question, model, sent.tenant)
        return prompt if isinstance(prompt, Unrendered) else prompt.chain(block_tokens, lora, sent.salt)

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._client.close()

    def _pays(self, prompt: TextPrompt) -> bool:
        """Whether what is estimated without a rendering is worth one."""
        assert prompt.media_at is not None
        learned = self._learned()
        text_tokens = (prompt.size - prompt.media_at) / learned.bytes_per_token
        return text_tokens + len(prompt.image_ends) * learned.image_tokens >= MIN_TOKENS

    async def _await(self, question: RenderQuestion, model: str, tenant: str) -> RenderedPrompt | Unrendered:
        """The rendering if it comes in time; callers with the same prompt share one question. Where they come too late
        for some time, it is not waited for, and asked for only for the sake of images that later prompts may have."""
        is_new = any(key not in self._images for key in question.images)
        patience = self._patience_of(tenant, is_new)
        if not (patience.waits or is_new):
            return Unrendered.LATE
        task = self._pending.get(question.key)
        if task is None:
            url = self._instance(model)
            if url is None:
                return Unrendered.OFF
            try:
                sent_bytes = question.sent_bytes(self._images)
            except UnrenderedError:
                return Unrendered.REFUSED
            if not self._waiting.has_room(tenant, sent_bytes, MAX_WAITING_BYTES):
                return Unrendered.BUSY
            self._waiting.enter(tenant, sent_bytes)
            task = self._pending[question.key] = asyncio.create_task(
                self._learn(question, url, model, tenant, sent_bytes)
            )
        if not patience.waits:
            return Unrendered.LATE
        try:
            async with asyncio.timeout(self.timeout_s):
                found = await asyncio.shield(task)
        except TimeoutError:
            patience.late()
            return Unrendered.LATE
        patience.in_time()
        return found

    def _patience_of(self, tenant: str, is_new: bool) -> _Patience:
        found = self._patience.get((tenant, is_new))
        if found is None:
            self._patience.keep((tenant, is_new), found := _Patience(self._clock), 1)
        return found

    def _instance(self, model: str) -> str | None:
        """An instance that may render."""
        view, now_s = self._view(), self._clock.monotonic_s()
        urls = {view.instances[each].url for each in view.ready_with(model)}
        asked = [url for url in urls if self._not_before_s.get(url, 0.0) <= now_s]
        return random.choice(asked) if asked else None

    async def _learn(
        self, question: RenderQuestion, url: str, model: str, tenant: str, sent_bytes: int
    ) -> RenderedPrompt | Unrendered:
        try:
            while others := [each for key in question.images if (each := self._asked_for.get(key)) is not None]:
                await others[0].wait()
            return await self._render(question, url, model, tenant)
        finally:
            del self._pending[question.key]
            self._waiting.leave(tenant, sent_bytes)

    async def _render(self, question: RenderQuestion, url: str, model: str, tenant: str) -> RenderedPrompt | Unrendered:
        known = {key: found for key in question.images if (found := self._images.get(key)) is not None}
        new = [key for key in dict.fromkeys(question.images) if key not in known]
        now_s = self._clock.monotonic_s()
        if any((self._refused.get(key) or 0.0) > now_s for key in new):
            return Unrendered.REFUSED
        done = asyncio.Event()
        self._asked_for |= dict.fromkeys(new, done)
        try:
            async with self._client.turn(tenant):
                if self._numbers is None:  # also keeps images from an instance that renders none
                    self._numbers = await self._are_numbered(url, model)
                    if self._numbers:
                        return Unrendered.LATE
                body = await _in_thread(question.sent_bytes(known), lambda: question.body(known))
                answer = await self._post(url, body, is_new=bool(new))
            if answer is None:
                raise UnrenderedError("it was refused")
            rendered = await _in_thread(len(answer), lambda: read_rendered(answer, len(question.images)))
        except UnrenderedError as error:
            log.debug("prompt not rendered: %s", error)
            for key in new:
                self._refused.keep(key, now_s + RETRY_S, 1)
            return Unrendered.REFUSED
        except TokenizeError as error:
            if url not in self._not_before_s:
                log.warning(
                    "%s does not render prompts with images: %s; they are estimated. vLLM renders with"
                    " --enable-scale-out",
                    url, error,
                )  # fmt: skip
            self._not_before_s[url] = now_s + RETRY_S
            return Unrendered.OFF
        finally:
            for key in new:
                del self._asked_for[key]
            done.set()
        self._not_before_s.pop(url, None)
        for place, key in enumerate(question.images):
            if key not in known:
                image = rendered.image(place)
                self._images.keep(key, image, image.memory_bytes)
        prompt = rendered.with_images([known.get(key) for key in question.images])
        self._prompts.keep(question.key, prompt, prompt.memory_bytes)
        return prompt

    async def _post(self, url: str, body: bytes, *, is_new: bool) -> bytes | None:
        """The answer; None where the prompt is at fault, as one is whose new images take too long to fetch."""
        try:
            return await self._client.post(url + RENDER_PATH, body)
        except LateAnswerError:
            if is_new:
                return None
            raise

    async def _are_numbered(self, url: str, model: str) -> bool:
        answer = await self._client.post(url + RENDER_PATH, two_stand_ins(model))
        if answer is None:  # no more than one image is allowed, or none
            return False
        rendered = read_rendered(answer, 2)
        return rendered.image(0).ids != rendered.image(1).ids


async def _in_thread(size_bytes: int, work: Callable[[], T]) -> T:
    return work() if size_bytes < _IN_THREAD_BYTES else await asyncio.to_thread(work)
