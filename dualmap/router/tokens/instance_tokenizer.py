"""Token ids as an instance counts them, by its ``/tokenize``: for models whose files are not at hand.

The instance renders the prompt by its own chat template and tokenizes it: the ids are exact whatever the model. It is
called for each new prompt as a whole, beside the request and for a set time: a request that has no ids by then has byte
blocks, and the answer serves its retry, or the next request with the same prompt. Needs no extra of the package.
"""

from __future__ import annotations

import asyncio
import logging
import random
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson
import xxhash

from dualmap.router.kept import Kept
from dualmap.router.prompts.inference_request import SentPrompt, TokenSource
from dualmap.router.prompts.prompt import TokenizedHow
from dualmap.router.tokens.instance_client import InstanceClient, TokenizeError, Waiting
from dualmap.router.tokens.request_kind import RequestKind
from dualmap.runtime.clock import Clock
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES, BlockExtras, engine_chain
from dualmap.scheduling.state.registered_adapters import model_of
from dualmap.scheduling.state.view import ClusterView

log = logging.getLogger(__name__)

RETRY_S: Final = 30.0
"""Time before the next query after an instance that has no ``/tokenize``, or did not answer."""
MAX_TEXT_BYTES: Final = 1 << 20
_ENTRY_BYTES: Final = 200
_TEMPLATE_FIELDS: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message")
_RESPONSE_TEXTS: Final = ("input_text", "output_text")


class InstanceTokenizer:
    """The tokenizer of one pool's instances, on one replica."""

    def __init__(
        self, model: str, view: Callable[[], ClusterView], client: InstanceClient, *, clock: Clock, timeout_s: float,
        max_bytes: int, count: Callable[[TokenizedHow], None],
    ) -> None:  # fmt: skip
        """``count`` is called with the reason why a prompt has no chain; ``max_bytes`` bounds what is kept."""
        self._model = model
        self._view = view
        self._client = client
        self._clock = clock
        self._timeout_s = timeout_s
        self._count = count
        self._known: Kept[int, array[int]] = Kept(max_bytes)
        self._pending: dict[int, asyncio.Task[array[int] | None]] = {}
        self._waiting = Waiting()
        self._not_before_s = 0.0

    @property
    def memory_bytes(self) -> int:
        return self._known.memory_bytes

    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Chain | None:
        """The chain of the engine's blocks; None if it cannot be had, or not in time."""
        source = sent.source
        model = model_of(lora) if lora else self._model
        question = _question(source, model) if source is not None else None
        if question is None:
            self._count("bytes")
            return None
        key = tenant_digest(sent.tenant, question)
        ids = self._known.get(key)
        if ids is None:
            ids = await self._await(key, question, model, sent.tenant)
            if ids is None:
                return None
        return engine_chain(ids, block_tokens, BlockExtras.of(lora, sent.salt))

    async def chain_on(
        self, sent: SentPrompt, kind: RequestKind, *, lora: str | None, block_tokens: int
    ) -> Chain | None:
        """None: an instance renders and tokenizes whole chats."""
        return None

    async def close(self) -> None:
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        await self._client.close()

    async def _await(self, key: int, question: bytes, model: str, tenant: str) -> array[int] | None:
        """The instance's answer if it comes in time; callers with the same prompt share one query."""
        task = self._pending.get(key)
        if task is None:
            if self._clock.monotonic_s() < self._not_before_s:
                self._count("bytes")
                return None
            if not self._waiting.has_room(tenant, 0, 0):
                self._count("busy")
                return None
            self._waiting.enter(tenant, 0)
            task = self._pending[key] = asyncio.create_task(self._learn(key, question, model, tenant))
        try:
            async with asyncio.timeout(self._timeout_s):
                ids = await asyncio.shield(task)
        except TimeoutError:
            self._count("late")
            return None
        if ids is None:
            self._count("bytes")
        return ids

    async def _learn(self, key: int, question: bytes, model: str, tenant: str) -> array[int] | None:
        try:
            async with self._client.turn(tenant):
                ids = await self._query(question, model)
        finally:
            del self._pending[key]
            self._waiting.leave(tenant, 0)
        if ids is not None:
            self._known.keep(key, ids, _ENTRY_BYTES + TOKEN_BYTES * len(ids))
        return ids

    async def _query(self, question: bytes, model: str) -> array[int] | None:
        view = self._view()
        ready = view.ready_with(model)
        if not ready:
            return None
        url = view.instances[random.choice(ready)].url
        try:
            return await self._query_at(url, question)
        except TokenizeError as error:
            self._not_before_s = self._clock.monotonic_s() + RETRY_S
            log.warning("%s/tokenize does not count: %s; prompts are cut by bytes for %.0f s", url, error, RETRY_S)
            return None

    async def ids(self, source: TokenSource, url: str) -> array[int] | None:
        """The token ids of a prompt as the instance at ``url`` has them; None if it is not one to ask for, or refused.

        Raises:
            TokenizeError: the instance does not tokenize.
        """
        question = _question(source, self._model)
        return None if question is None else await self._query_at(url, question)

    async def _query_at(self, url: str, question: bytes) -> array[int] | None:
        answer = await self._client.post(f"{url}/tokenize", question)
        if answer is None:
            return None
        try:
            # The emulator gives a partial last token a length above its 32 bits.
            return array("I", [token & 0xFFFFFFFF for token in orjson.loads(answer)["tokens"]])
        except (ValueError, KeyError, TypeError) as error:
            raise TokenizeError(repr(error)) from error


def tenant_digest(tenant: str, content: bytes) -> int:
    """A hash of content that a tenant sent: what is known of prompts is apart for each, so that none can find out by
    time what another one has sent."""
    return xxhash.xxh3_64_intdigest(content, xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass")))


def _question(source: TokenSource, model: str) -> bytes | None:
    """The body for ``/tokenize``; None for a prompt that it cannot tokenize."""
    if source.has_media or source.text_bytes > MAX_TEXT_BYTES:
        return None
    body = source.body()
    special = bool(body.get("add_special_tokens", source.adds_special_tokens))
    if source.path == "/v1/completions":
        fields: dict[str, Any] = {"prompt": body["prompt"]}
    elif body.get("chat_template") is not None:
        return None
    else:
        fields = chat_fields(body)
    try:
        return orjson.dumps({"model": model, "add_special_tokens": special, **fields})
    except orjson.JSONEncodeError:  # a lone surrogate
        return None


def chat_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields by which ``/tokenize`` renders a chat completions body as the engine does."""
    fields: dict[str, Any] = {name: body[name] for name in _TEMPLATE_FIELDS if body.get(name) is not None}
    fields["messages"] = [chat_message(message) for message in body["messages"]]
    fields["chat_template_kwargs"] = _variables(body)
    return fields


def chat_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message in the words that ``/tokenize`` knows. It drops parts of the responses API and an older name of
    reasoning, which the APIs themselves take for text and for reasoning."""
    content, reasoning = message.get("content"), message.get("reasoning_content")
    if isinstance(content, list):
        message = {**message, "content": [_chat_part(part) for part in content]}
    if reasoning is not None and message.get("reasoning") is None:
        message = {**message, "reasoning": reasoning}
    return message


def _chat_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in _RESPONSE_TEXTS:
        return {**part, "type": "text"}
    return part


def _variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that chat completions take from fields of their own, which ``/tokenize`` lacks."""
    own = body.get("chat_template_kwargs")
    variables = dict(own) if isinstance(own, Mapping) else {}
    effort = body.get("reasoning_effort")
    if effort is not None and "enable_thinking" not in variables:
        variables["enable_thinking"] = effort != "none"
    for name in ("documents", "reasoning_effort"):
        if body.get(name) is not None:
            variables[name] = body[name]
    return variables
