"""Reading what the scheduler needs from a request body: chain, expected output, bytes to learn from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.json_body import UnreadableJsonError
from dualmap.api_bodies.lax_values import lax_int
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.pooled_prompt import pooled_prompt
from dualmap.api_bodies.prompt import MAX_PARTS, LongTexts, chat_prompt, completion_prompt
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    MESSAGES_PATH,
    POOLED_PATHS,
    RESPONSES_PATH,
    SentPrompt,
    TokenSource,
)
from dualmap.router.prompts.known_bodies import ContinuedChat, HashedText
from dualmap.router.steps import in_steps
from dualmap.scheduling.estimates.answer_length import expected_answer_tokens
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import (
    BlockRule,
    ContinuedText,
    Prompt,
    TextPrompt,
    cache_seed,
    continued_chain,
    uncached_chain,
    with_images,
)
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import BlockExtras
from dualmap.scheduling.values import value

LONG_PROMPT_BYTES: Final = 1 << 20
"""A longer one is hashed in steps."""

_UNKNOWN_TEXT: Final = frozenset({"truncate_prompt_tokens", "previous_response_id", "prompt_embeds"})
"""Fields with which an engine sees less of a prompt, or more, than the body has."""

_MAX_COUNT: Final = 2**31 - 1
_NO_LONG_TEXTS: Final[LongTexts] = {}

log = logging.getLogger(__name__)

TokenizedHow = Literal["exact", "unverified", "rendered", "head", "bytes", "late", "busy"]
"""Outcome of tokenizing a prompt. ``exact``: its tokens are counted by a method that engines' own counts have
confirmed; ``unverified``: they have not yet. ``rendered``: an instance rendered it, images and all. ``head``: tokens
are computed up to the first message with media. ``bytes``: they cannot be computed, or are known to differ from the
engine's."""


class Unrendered(StrEnum):
    """Why an instance did not render a prompt with media, so that these are estimated."""

    UNSET = "unset"
    OTHER_MEDIA = "other_media"
    SMALL = "small"
    OFF = "off"
    LATE = "late"
    BUSY = "busy"
    REFUSED = "refused"
    MISTRUSTED = "mistrusted"


WHY_UNRENDERED: Final = {
    Unrendered.UNSET: "the pool has no tokenizer",
    Unrendered.OTHER_MEDIA: "it has sound, video or embeddings, or continues what an instance stored",
    Unrendered.SMALL: "it is too small for a rendering to pay",
    Unrendered.OFF: "no instance renders prompts (vLLM: --enable-scale-out)",
    Unrendered.LATE: "its rendering did not come within router.tokenize_timeout_s",
    Unrendered.BUSY: "too many prompts waited for a rendering",
    Unrendered.REFUSED: "an instance refused to render it, or it cannot be sent",
    Unrendered.MISTRUSTED: "instances counted other tokens in such prompts than they had rendered",
}
"""The reason why images are estimated, as the end of a sentence."""


@value
class TokenCount:
    """How a prompt's tokens were counted, to be compared with what its instance reports."""

    by: str
    kind: frozenset[str]
    """The kind of request, see ``router.tokens.request_kind``."""


@value
class TokenizedPrompt:
    chain: Chain | None
    """The prompt's chain of engine blocks, or that of what comes before the first message with media (``unrendered``).
    None if the blocks cannot be had, or not in time."""
    count: TokenCount | None = None
    """None where nothing was counted that an instance would report."""
    unrendered: Unrendered | None = None
    """Why media in it are estimated; None: it has none, or they are rendered."""


class PromptTokenizer(Protocol):
    """Computes the engine's own blocks of prompts, and learns from the engines' counts."""

    async def tokenize(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt: ...

    async def tokenize_on(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> TokenizedPrompt | None:
        """Tokenize what is new in a chat whose beginning is known; None where it has to be tokenized whole."""

    def reported(self, count: TokenCount, counted_tokens: int, reported_tokens: int, instance_id: str) -> None:
        """An instance has answered a prompt that was counted."""

    @property
    def status(self) -> str:
        """Whether its counts are exact, in words."""

    @property
    def is_mistrusted(self) -> bool:
        """Whether it is known to count other tokens than the instances, be it for some kinds of requests only."""

    async def run(self) -> None:
        """Compare it with the instances, at the start and when there is reason to. Runs until cancelled."""

    async def close(self) -> None:
        """Let go of threads and connections."""


@value
class ReadPrompt:
    chain: Chain
    text_bytes: int | None
    """See ``SentPrompt``."""
    expected_output_tokens: int
    """Counts in the shared load: the mean answer to requests with similar limits, or the limit if that is lower. A
    limit is no forecast: most clients send one that few of their answers reach, and instances whose running requests
    were counted by it would always look full. The instance gets the limit as it was sent."""
    output_limit: int | None = None
    """The most tokens that its answer may have; None: it sets no limit."""
    count: TokenCount | None = None
    """How the tokens of text were counted: the chain is of the engine's own blocks then. None: they are estimated."""
    _: KW_ONLY
    images: int = 0
    """Images in the prompt: how many tokens they have is learned from it, and no bytes per token."""
    unrendered: Unrendered | None = None
    """Why its media are estimated; None: it has none, or they are rendered."""
    stored_tokens: int = 0
    """Tokens of the conversation before it, which the request continues and its instance has stored."""

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation."""
        return self.stored_tokens + self.chain.prompt_tokens


def sent_prompt(
    path: str, body: Mapping[str, Any], long_texts: LongTexts = _NO_LONG_TEXTS, *, max_parts: int = MAX_PARTS
) -> SentPrompt | None:
    """The prompt in the body of a scheduled request. None where no prompt is found, or none that can be read: such a
    request is passed on. Whether an engine serves it, the engine decides, by the same bytes."""
    pooled = path in POOLED_PATHS
    try:
        prompt = (
            _render(path, body, long_texts, max_parts)
            if not pooled
            else pooled_prompt(body, long_texts, max_parts=max_parts)
        )
    except (PromptError, UnreadableJsonError, RecursionError) as error:
        log.debug("a request of %s is passed on: %s", path, error)
        return None
    return None if prompt is None else sent_as(path, body, prompt, long_texts)


def sent_as(
    path: str, body: Mapping[str, Any], prompt: Prompt, long_texts: LongTexts = _NO_LONG_TEXTS
) -> SentPrompt | None:
    """The prompt of a body, which was rendered; None where it is empty."""
    pooled, salt = path in POOLED_PATHS, body.get("cache_salt")
    source, teaches = None, False
    if isinstance(prompt, TextPrompt):
        if prompt.is_empty:
            return None
        if shows_its_text(body) and not pooled and not prompt.unread:
            if not isinstance(body.get("prompt"), list):
                source = TokenSource(path, body, long_texts, prompt)
            teaches = not prompt.other_media
    limit = output_limit(path, body)
    return SentPrompt(prompt, salt if isinstance(salt, str) else None, teaches, limit, source, pooled=pooled)


def shows_its_text(body: Mapping[str, Any]) -> bool:
    """Whether an engine sees what the body has, no more and no less."""
    return _UNKNOWN_TEXT.isdisjoint(body) or all(body.get(name) is None for name in _UNKNOWN_TEXT)


def _render(path: str, body: Mapping[str, Any], long_texts: LongTexts, max_parts: int) -> Prompt:
    """All APIs' conversations as those of chat completions, so that they have the same blocks."""
    if path == MESSAGES_PATH:
        body = chat_of_message(body)
    elif path == RESPONSES_PATH:
        body = chat_of_response(body)
    elif not path.endswith("/chat/completions"):
        return completion_prompt(body, long_texts, max_parts=max_parts)
    return chat_prompt(body, long_texts, max_parts=max_parts)


def read_text(
    sent: SentPrompt, *, model: str, lora: str | None, rule: BlockRule, learned: Learned
) -> ReadPrompt | None:
    """Hash a prompt of text alone, by its bytes, at once; None for a longer one, and for any other."""
    prompt = sent.prompt
    if not isinstance(prompt, TextPrompt) or sent.pooled or prompt.media_at is not None:
        return None
    data = prompt.data
    if len(data) > LONG_PROMPT_BYTES:
        return None
    seed = unsalted_seed(model, lora) if sent.salt is None else cache_seed(model, lora, sent.salt)
    chain = rule.text_chain(data, seed, learned.bytes_per_token)
    if sent.hashed is not None:
        _keep(sent, rule, seed, chain, 0, data)
    limit = sent.output_limit
    return ReadPrompt(chain, sent.text_bytes, expected_answer_tokens(learned.answer_tokens, limit), limit)


async def read_prompt(
    sent: SentPrompt,
    *,
    model: str,
    lora: str | None,
    rule: BlockRule,
    learned: Learned,
    tokenizer: PromptTokenizer | None = None,
) -> ReadPrompt:
    """Hash the prompt of a scheduled request: a long one in steps, any other at once. Text becomes the engine's own
    blocks if there is a tokenizer, and it answers in time."""
    if tokenizer is None:
        text = read_text(sent, model=model, lora=lora, rule=rule, learned=learned)
        if text is not None:
            return text
    limit = sent.output_limit
    expected = expected_answer_tokens(learned.answer_tokens, limit)
    seed = unsalted_seed(model, lora) if sent.salt is None else cache_seed(model, lora, sent.salt)
    prompt = sent.prompt
    if isinstance(prompt, (ContinuedText, ContinuedChat)):
        if isinstance(prompt, ContinuedChat):
            known = None
            if tokenizer is not None and not sent.pooled:
                known = await tokenizer.tokenize_on(sent, lora=lora, block_tokens=rule.token_block_tokens)
            if known is not None and known.chain is not None:
                return ReadPrompt(known.chain, sent.text_bytes, expected, limit, known.count)
        elif tokenizer is None and not sent.pooled and rule.goes_on(prompt.begins, seed):
            chain = rule.continued(prompt, learned.bytes_per_token)
            _keep(sent, rule, seed, chain, prompt.begins.blocks * rule.block_bytes, prompt.data)
            return ReadPrompt(chain, sent.text_bytes, expected, limit)
        assert sent.whole is not None
        sent = replace(sent.whole(), pooled=sent.pooled, salt=sent.salt, tenant=sent.tenant)
        prompt = sent.prompt
        assert not isinstance(prompt, (ContinuedText, ContinuedChat))
    if sent.pooled:
        return ReadPrompt(uncached_chain(prompt, learned.bytes_per_token), None, expected, limit)
    unrendered = Unrendered.UNSET if isinstance(prompt, TextPrompt) and prompt.has_media else None
    if tokenizer is not None:
        if sent.late_source is not None:
            sent = replace(sent, source=sent.late_source(), late_source=None)
        tokenized = await tokenizer.tokenize(sent, lora=lora, block_tokens=rule.token_block_tokens)
        if tokenized.chain is not None:
            return _tokenized(tokenized, tokenized.chain, sent, expected, learned)
        unrendered = tokenized.unrendered
    images = 0
    if isinstance(prompt, TextPrompt) and prompt.image_ends:
        images = len(prompt.image_ends)
        prompt = with_images(prompt, learned.image_tokens, learned.bytes_per_token)
    if isinstance(prompt, TextPrompt) and len(prompt.data) <= LONG_PROMPT_BYTES:
        chain = rule.chain(prompt, seed, learned.bytes_per_token)
    else:
        extras = BlockExtras.of(lora, sent.salt)
        chain = await in_steps(rule.chain_in_steps(prompt, seed, learned.bytes_per_token, extras))
    if isinstance(prompt, TextPrompt):
        _keep(sent, rule, seed, chain, 0, prompt.data)
    return ReadPrompt(chain, sent.text_bytes, expected, limit, images=images, unrendered=unrendered)


def _keep(sent: SentPrompt, rule: BlockRule, seed: int, chain: Chain, before: int, data: bytes) -> None:
    """Keep the blocks of a conversation for its next turn."""
    if sent.hashed is not None:
        sent.hashed(HashedText(seed, rule.block_bytes, chain.hashes, before, data))


def _tokenized(
    tokenized: TokenizedPrompt, chain: Chain, sent: SentPrompt, expected_tokens: int, learned: Learned
) -> ReadPrompt:
    prompt, ratio, unrendered = sent.prompt, learned.bytes_per_token, tokenized.unrendered
    if unrendered is not None and isinstance(prompt, TextPrompt) and prompt.media_at is not None:
        rest = with_images(prompt, learned.image_tokens, ratio).data[prompt.media_at :]
        chain = continued_chain(chain, rest, ratio)
    return ReadPrompt(
        chain,
        sent.text_bytes,
        expected_tokens,
        sent.output_limit,
        tokenized.count,
        images=sent.images,
        unrendered=unrendered,
    )


@lru_cache(maxsize=1024)
def unsalted_seed(model: str, lora: str | None) -> int:
    """The seed without a salt, the same for almost all requests for a model."""
    return cache_seed(model, lora)


def output_limit(path: str, body: Mapping[str, Any]) -> int | None:
    """The most tokens of an answer, by the field of the path's API; None where the body sets no limit. An engine reads
    no other API's field."""
    if path in POOLED_PATHS:
        return 1
    if path == RESPONSES_PATH:
        return count_in(body, "max_output_tokens")
    newer = count_in(body, "max_completion_tokens") if path == CHAT_PATH else None
    return count_in(body, "max_tokens") if newer is None else newer


def count_in(body: Mapping[str, Any], name: str) -> int | None:
    """The count in a field of the body; None where it is absent, or no count."""
    if (sent := body.get(name)) is None:
        return None
    count = lax_int(sent)
    return count if count is not None and 0 <= count <= _MAX_COUNT else None
