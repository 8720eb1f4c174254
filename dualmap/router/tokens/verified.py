"""A pool's tokenizer, whose counts are called exact only where an engine has confirmed them.

The model's files count first; where they are known to be wrong, for all prompts or for a kind of request, the
instances' own tokenizer does; where that is wrong, too, prompts are cut by bytes (``scheduling.prompts.token_trust``).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Final, Protocol

from dualmap.router.prompts.inference_request import SentPrompt
from dualmap.router.prompts.known_bodies import ContinuedChat
from dualmap.router.prompts.prompt import TokenCount, TokenizedHow, TokenizedPrompt, Unrendered
from dualmap.router.tokens.comparison import Compared
from dualmap.router.tokens.request_kind import RequestKind, kind_of, kind_of_frame, kind_of_messages
from dualmap.runtime.clock import Clock
from dualmap.runtime.extras import how_to_install
from dualmap.scheduling.prompts.blocks import TextPrompt
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.token_trust import TokenTrust, Trust
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.values import replaced

log = logging.getLogger(__name__)

FILES: Final = "the model's files"
RENDERED: Final = "the instances' /render"
INSTANCES: Final = "the instances' /tokenize"
POLL_S: Final = 2.0
AGAIN_S: Final = 60.0
"""Time before the next comparison after an instance that could not be compared with."""
WARN_S: Final = 60.0
"""Kinds of requests are named in the log no more often than this: clients choose how many there are."""


class TokenCounter(Protocol):
    """Computes chains by one method."""

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | None: ...

    async def chain_on(
        self, sent: SentPrompt, kind: RequestKind, *, lora: str | None, block_tokens: int
    ) -> Chain | None:
        """The chain of a chat whose beginning is known, by what is new; None where it has to be made whole. All its
        messages together are of this kind."""

    async def close(self) -> None: ...


class Renderer(Protocol):
    """Computes chains of prompts with images."""

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | Unrendered: ...

    async def close(self) -> None: ...


class Comparison(Protocol):
    """Compares texts with an instance; None where it does not tokenize."""

    async def __call__(self, instance: InstanceSpec) -> tuple[Compared, ...] | None: ...


class VerifiedTokenizer:
    """The counters of one pool on one replica, the preferred one first."""

    def __init__(
        self, counters: Mapping[str, TokenCounter], renderer: Renderer, *, pool: str, view: Callable[[], ClusterView],
        clock: Clock, count: Callable[[TokenizedHow], None], unrendered: Callable[[Unrendered], None],
        miscounted: Callable[[], None], compare: Comparison | None = None,
    ) -> None:  # fmt: skip
        """``count`` is called with the outcome of each prompt, ``unrendered`` for each whose media are estimated,
        ``miscounted`` for each that an instance counted otherwise. ``compare`` is for the first counter; without, it is
        the instances' own."""
        self._counters = dict(counters)
        self._renderer = renderer
        self._unrendered = unrendered
        self._trusts = {by: TokenTrust(Trust.EXACT if by == INSTANCES else Trust.UNVERIFIED) for by in self._counters}
        self._trusts[RENDERED] = TokenTrust(Trust.EXACT)
        self._first = next(iter(self._counters))
        self._pool = pool
        self._view = view
        self._clock = clock
        self._count = count
        self._miscounted = miscounted
        self._compare = compare
        self._warned_s = float("-inf")

    async def tokenize(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt:
        if sent.source is None:
            self._count("bytes")
            has_media = isinstance(sent.prompt, TextPrompt) and sent.prompt.has_media
            return TokenizedPrompt(None, unrendered=Unrendered.OTHER_MEDIA if has_media else None)
        kind, unrendered = kind_of(sent.source), None
        if sent.source.has_media:
            rendered = await self._rendered(sent, kind, lora, block_tokens)
            if not isinstance(rendered, Unrendered):
                self._count("rendered")
                return TokenizedPrompt(rendered, TokenCount(RENDERED, kind))
            unrendered = rendered
            self._unrendered(unrendered)
        for by, counter in self._counters.items():
            if self._trust(by, kind) is Trust.MISTRUSTED:
                continue
            chain = await counter.chain(sent, lora=lora, block_tokens=block_tokens)
            if chain is None:  # it has counted why
                return TokenizedPrompt(None, unrendered=unrendered)
            if unrendered is not None:
                self._count("head")
                return TokenizedPrompt(chain, unrendered=unrendered)
            self._count("exact" if self._trust(by, kind) is Trust.EXACT else "unverified")
            return TokenizedPrompt(chain, TokenCount(by, kind))
        self._count("bytes")
        return TokenizedPrompt(None, unrendered=unrendered)

    async def tokenize_on(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt | None:
        known, counter = sent.prompt, self._counters[self._first]
        if not isinstance(known, ContinuedChat) or sent.late_source is None:
            return None
        source = sent.late_source()
        messages = known.known.end.kind | kind_of_messages(source)
        kind = messages | kind_of_frame(source)
        if (trust := self._trust(self._first, kind)) is Trust.MISTRUSTED:
            return None
        chain = await counter.chain_on(replaced(sent, source=source), messages, lora=lora, block_tokens=block_tokens)
        if chain is None:
            return None
        self._count("exact" if trust is Trust.EXACT else "unverified")
        return TokenizedPrompt(chain, TokenCount(self._first, kind))

    async def _rendered(
        self, sent: SentPrompt, kind: RequestKind, lora: str | None, block_tokens: int
    ) -> Chain | Unrendered:
        if self._trust(RENDERED, kind) is Trust.MISTRUSTED:
            return Unrendered.MISTRUSTED
        return await self._renderer.chain(sent, lora=lora, block_tokens=block_tokens)

    def reported(self, count: TokenCount, counted_tokens: int, reported_tokens: int, instance_id: str) -> None:
        trust, now_s, agreed = self._trusts[count.by], self._clock.monotonic_s(), counted_tokens == reported_tokens
        if not agreed:
            self._miscounted()
        newly = trust.counted(count.kind, agreed=agreed, now_s=now_s)
        if newly and now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            log.warning(
                "pool %s: %s counted %d tokens where %s counted %d, in a request with %s: such requests are counted"
                " by %s for now, see dualmap_miscounted_prompts_total",
                self._pool,
                count.by,
                counted_tokens,
                instance_id,
                reported_tokens,
                ", ".join(sorted(count.kind)),
                self._next(count.by),
            )

    @property
    def status(self) -> str:
        trust, kinds = self._trusts[self._first], self._mistrusted_kinds
        if trust.whole is Trust.MISTRUSTED:
            return f"mistrusted ({self._next(self._first)})"
        return f"{trust.whole} ({kinds} kinds of requests mistrusted)" if kinds else trust.whole.value

    @property
    def is_mistrusted(self) -> bool:
        now_s, trusts = self._clock.monotonic_s(), (self._trusts[self._first], self._trusts[RENDERED])
        return any(trust.whole is Trust.MISTRUSTED or trust.mistrusted_kinds(now_s) > 0 for trust in trusts)

    async def run(self) -> None:
        while True:
            pause_s = POLL_S
            if self._compare is not None and self._trusts[self._first].is_comparison_due(self._clock.monotonic_s()):
                view = self._view()
                if view.ready and not await self.verify(view.instances[random.choice(view.ready)]):
                    pause_s = AGAIN_S
            await self._clock.sleep(pause_s)

    async def verify(self, instance: InstanceSpec) -> bool:
        """Compare texts with the instance; False if it could not be compared with."""
        assert self._compare is not None
        found = await self._compare(instance)
        texts = [each for each in found or () if not each.is_chat]
        if found is None or not texts:
            return False
        trust, now_s = self._trusts[self._first], self._clock.monotonic_s()
        was, differing = trust.whole, [each for each in texts if not each.agreed]
        trust.compared(agreed=not differing, now_s=now_s)
        for each in found:
            if each.is_chat:
                trust.judge(kind_of(each.source), agreed=each.agreed, now_s=now_s)
        chats = [each for each in found if each.is_chat and not each.agreed]
        if differing:
            log.warning(
                "pool %s: %s are not those of %s: %d of %d texts have other tokens there, as %r (%d, there %d). %s"
                " counts instead. %s",
                self._pool, self._first, instance.instance_id, len(differing), len(texts),
                differing[0].source.fields["prompt"][:40], differing[0].own_tokens, differing[0].instance_tokens,
                self._next(self._first), _likely_cause(),
            )  # fmt: skip
        elif chats:
            log.warning(
                "pool %s: the chat template is not that of %s: %d chats have other tokens there, as %r (%d, there %d)."
                " Are chat_template and chat_template_kwargs of the pool those of the instances?",
                self._pool, instance.instance_id, len(chats), chats[0].source.fields["messages"][:2],
                chats[0].own_tokens, chats[0].instance_tokens,
            )  # fmt: skip
        elif was is not Trust.EXACT:
            log.info("pool %s: %s count as %s does", self._pool, self._first, instance.instance_id)
        return True

    async def close(self) -> None:
        await self._renderer.close()
        for counter in self._counters.values():
            await counter.close()

    def _trust(self, by: str, kind: frozenset[str]) -> Trust:
        return self._trusts[by].of(kind, self._clock.monotonic_s())

    @property
    def _mistrusted_kinds(self) -> int:
        return self._trusts[self._first].mistrusted_kinds(self._clock.monotonic_s())

    def _next(self, by: str) -> str:
        """The tokenizer that counts where ``by`` is mistrusted."""
        if by == RENDERED:
            return "the average of images"
        names = list(self._counters)
        after = names[names.index(by) + 1 :]
        return after[0] if after else "bytes"


def _likely_cause() -> str:
    """A sentence for the log: why a pool's files may give other tokens than an instance."""
    if find_spec("transformers") is None:
        return f"Instances load tokenizers by transformers, which is not installed here: {how_to_install('tokens')}"
    return "Are the files those of the instance, and is transformers of the same version?"
