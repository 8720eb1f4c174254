"""An inference request as its client sent it, before it is placed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY
from typing import Any
from urllib.parse import unquote

from xxhash import xxh3_64_hexdigest

from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.prompt import LongTexts
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.router.errors import RouterError
from dualmap.router.prompts.known_bodies import ContinuedChat, HashedText
from dualmap.router.prompts.run_identity import SentRun
from dualmap.router.telemetry.trace_context import TraceContext
from dualmap.scheduling.prompts.blocks import ContinuedText, Prompt, TextPrompt
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.scheduling.values import record, value

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
COMPLETIONS_PATHS = frozenset({CHAT_PATH, COMPLETIONS_PATH})
POOLED_PATHS = frozenset(
    {
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
        "/classify",
        "/pooling",
        "/rerank",
        "/score",
    }
)
"""Paths that are scheduled by load alone: their prompts are counted, and looked for in no cache."""
SCHEDULED_PATHS = COMPLETIONS_PATHS | {MESSAGES_PATH, RESPONSES_PATH} | POOLED_PATHS
"""Every other path is passed to any suitable instance of the pool."""
CONTINUING_PATHS = frozenset({RESPONSES_PATH, f"{RESPONSES_PATH}/render"})
"""The paths whose bodies may name a stored response: one that is continued, or the id under which one is stored."""
SALTED_PATHS = SCHEDULED_PATHS | {
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/v1/chat/completions/batch",
    "/v1/systemone",
}
"""The paths whose bodies vLLM takes a ``cache_salt`` in."""


@value
class TokenSource:
    """The source of a prompt's tokens: a body with one prompt, of text or with media in it."""

    path: str
    fields: Mapping[str, Any]
    long_texts: LongTexts
    """Strings that ``fields`` has the names of."""
    prompt: TextPrompt
    """Prompt from which blocks of bytes are cut."""

    @property
    def text_bytes(self) -> int:
        """Length of the rendered text, roughly."""
        return self.prompt.size

    @property
    def has_media(self) -> bool:
        """Tokens can be computed of what comes before the first message with media."""
        return self.prompt.has_media

    @property
    def parts(self) -> int:
        """Messages or items, or 1."""
        listed = self.fields.get("input" if self.path == RESPONSES_PATH else "messages")
        return len(listed) if isinstance(listed, list) else 1

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the engine puts the tokenizer's own special tokens around the text, unless the body says."""
        return self.path in ("/v1/completions", RESPONSES_PATH)

    def body(
        self, *, system_first: bool = False, unthinking_effort: str = "none", behind: bool = False
    ) -> Mapping[str, Any]:
        """A chat completions body, or a completions body, with all its strings. ``system_first``: the model's template
        takes no other system message than the first; ``unthinking_effort``: it is given this for disabled thinking.
        ``behind``: the messages are behind others, and so behind the system prompt that has a field of its own. Media
        are left out as far as they are long."""
        left_out = _MEDIA_FIELDS if self.has_media else _NONE
        fields = with_texts(self.fields, self.long_texts, left_out) if self.long_texts else self.fields
        if behind and (system := _SYSTEM_FIELDS.get(self.path)) in fields:
            fields = {name: given for name, given in fields.items() if name != system}
        if self.path == MESSAGES_PATH:
            return chat_of_message(fields, system_first=system_first, unthinking_effort=unthinking_effort)
        return chat_of_response(fields) if self.path == RESPONSES_PATH else fields


_SYSTEM_FIELDS = {MESSAGES_PATH: "system", RESPONSES_PATH: "instructions"}
_MEDIA_FIELDS = frozenset({"audio_url", "file", "image_embeds", "image_url", "input_audio", "source", "video_url"})
_NONE: frozenset[str] = frozenset()


def with_texts(given: Any, long_texts: LongTexts, left_out: frozenset[str] = _NONE) -> Any:
    """The value with the long strings that it has the names of, except in the fields that are left out."""
    if isinstance(given, str):
        text = long_texts.get(given)
        return given if text is None else text.decode("utf-8", "surrogatepass")
    if isinstance(given, list):
        return [with_texts(each, long_texts, left_out) for each in given]
    if isinstance(given, dict):
        return {
            name: each if name in left_out else with_texts(each, long_texts, left_out) for name, each in given.items()
        }
    return given


@value
class TokenBounds:
    """The tokens that a request which is passed on asks for."""

    prompt_bytes: int
    """Bytes that its prompts are made of, at most; a token has at least one. 0: nothing is known of them."""
    output_limit: int | None
    """The most tokens of each of its answers; None: it sets no limit."""
    answers: int = 1


_SIZED = (TextPrompt, ContinuedText, ContinuedChat)


@record
class SentPrompt:
    """A scheduled request's statement about its prompt, for any pool."""

    prompt: Prompt | ContinuedText | ContinuedChat
    salt: str | None
    """Requests that differ in it share no KV cache."""
    teaches: bool
    """Bytes per token, or tokens per image, can be learned from it: it is text, has no media other than images, and the
    engine is not to truncate it."""
    output_limit: int | None
    """Tokens of the answer at most."""
    source: TokenSource | None = None
    """None where the engine's tokens cannot be computed from text: token ids, several prompts, truncation, what only an
    instance has stored."""
    _: KW_ONLY
    late_source: Callable[[], TokenSource] | None = None
    """Reads the source of a prompt whose body was read without an object for each message, as only tokenizers need
    it; of a chat that is continued, it has the messages behind its beginning."""
    pooled: bool = False
    """The prompts are pooled or scored, or no one knows whose cache serves the request: they count, and no cache is
    looked at."""
    whole: Callable[[], SentPrompt] | None = None
    """Reads the whole of a prompt of which the beginning is known by its blocks alone."""
    hashed: Callable[[HashedText], None] | None = None
    """Is called with the blocks of its text, to keep them for the conversation's next turn."""
    tenant: str = ""
    """The tenant that sent it. What is known of prompts is apart for each."""

    @property
    def text_bytes(self) -> int | None:
        """Length of the rendered text; None where nothing can be learned from it."""
        prompt = self.prompt
        return prompt.size if self.teaches and isinstance(prompt, _SIZED) else None

    @property
    def images(self) -> int:
        return len(self.prompt.image_ends) if isinstance(self.prompt, TextPrompt) else 0


@record
class InferenceRequest:
    """One parsed inference request, before it is placed."""

    request_id: str
    """The client's, or one made for it. The fleet may know the request by another one: ``LiveRequest.request_id``."""
    model: str
    """Name of the model as the client sent it: a model name, an alias or a LoRA name; "" when it named none."""
    path: str
    prompt: SentPrompt | None
    """None for requests that are passed on, and once it is hashed: it may take as much memory as what was sent."""
    slo_s: float | None
    """TTFT SLO by header; None for the configured one."""
    stream: bool
    _: KW_ONLY
    form: bool = False
    """The body is a form, not JSON."""
    body_hash: int = 0
    """Hash of the raw body, for requests that are passed on: scheduled ones are identified by the hash of their prompt.
    """
    leaves_usage_open: bool = False
    """The request streams without ``stream_options``: only the fleet uses its usage."""
    refuses_usage: bool = False
    """The request streams with ``stream_options`` by which no usage comes."""
    leaves_ids_open: bool = False
    """The request does not say whether the answer is to have the ids of its tokens."""
    leaves_id_open: bool = False
    """The response is to be found again by an id that the fleet may give it."""
    leaves_load_open: bool = False
    """The request does not say itself what its instance is to load into its KV cache, or may not."""
    truncates_to: int | None = None
    """Tokens beyond which its engine truncates its prompt; None: it says none."""
    shows_prompt: bool = True
    """An engine sees its prompt as the body has it: it truncates nothing, and has stored nothing of it."""
    may_pull: bool = False
    """Its instance gets the place to pull a part of its prompt from, and a pull that is stuck is ended: not where a
    gateway carries the answer."""
    may_split: bool = False
    """Another instance than the one that prefills it can answer it."""
    not_continued: str = "it does not stream"
    """Why its answer is not continued by another instance should its own fail; empty where it may be."""
    prompts: int = 1
    """The number of prompts that it has."""
    answers: int = 1
    """The number of answers in its stream, as many to each prompt."""
    token_bounds: TokenBounds | None = None
    """The tokens that it asks for, where it is passed on; None: none."""
    in_background: bool = False
    """The instance answers at once, and continues to compute the response, whatever the client does."""
    stores: bool = False
    """The instance may store the response."""
    pinned_to: str | None = None
    """The instance that has stored what it continues."""
    continues: str | None = None
    """The stored response that it continues, which names the instance."""
    continued_run: str = ""
    """The run of that response, as a hash; empty: none is known."""
    model_span: tuple[int, int] | None = None
    """Span in a long body of the model's name, quotes included, or in a form of its value; None if it was not searched
    for."""
    unread: str = ""
    """Why nothing is known of its body but, perhaps, the model; empty for one that was read."""
    may_steer: bool = False
    """The body was not read, and may say what a client must not (``router.http.steering``)."""
    doubled: frozenset[str] = frozenset()
    """The fields, of those that rights depend on, that its body has more than once; looked for where its caller has
    such rights."""
    overrides: tuple[bytes, ...] = ()
    """Fields, as JSON, in place of what the client must not say (``router.http.steering``)."""
    form_edits: tuple[tuple[tuple[int, int], bytes], ...] = ()
    """Edits of a form that drop what the client must not say."""
    names_priority: bool = False
    """The body has a field ``priority``, of any value."""
    priority_span: tuple[int, int] | None = None
    """Span of that field's value in a form."""
    only: frozenset[str] | None = None
    """The instances that a gateway allows for it, or the router where it runs it by itself; None: any."""
    hides_first_token: bool = False
    """The answer does not pass here, so its first token is not seen."""
    hides_usage: bool = False
    """The answer does not pass here, so its tokens are not counted."""
    stops_at_mark: bool = False
    """The request has the stop string by which a decoder of vLLM-Ascend gives a request back."""
    computed_answers: int = 1
    """The number of answers that its instance computes, to all its prompts."""
    caller: Caller | None = None
    """The tenant that sent it, and its key; None: no tenant."""
    asked_class: str | None = None
    """The priority class that it asks for by header."""
    service_tier: str | None = None
    """OpenAI's ``service_tier``."""
    sent_priority: int | None = None
    """vLLM's ``priority``: lower goes first."""
    engine_priority: int | None = None
    """The priority that its instance is told in place of the client's; None: the client's own is left alone."""
    sent_salt: str | None = None
    """The client's ``cache_salt``, of a request that is passed on; else its prompt has it."""
    cache_salt: str | None = None
    """The salt that its instance is sent in place of the client's; None: the client's own is left alone."""
    cut_off: Callable[[RouterError], object] | None = None
    """Ends it with an error, where its key may be revoked meanwhile."""
    asked_revision: str = ""
    """The revision that it asks for by header; empty: none."""
    run: SentRun | None = None
    """The run that it is a turn of, as its client names it; None: the client names none."""
    trace: TraceContext | None = None
    """None where the replica does not trace."""
    client: str | None = None
    """Name of the verified certificate that its client showed; None without one."""

    @property
    def tenant(self) -> str:
        """The name of its tenant; empty for none."""
        return "" if self.caller is None else self.caller.tenant.name


_MARK = re.compile(r"(~t[0-9a-f]{16})@")
_NO_PART_OF_A_NAME = re.compile(rb"[^A-Za-z0-9_.-]")


def response_id(request_id: str, instance_id: str, tenant: str = "") -> str:
    """The id of a response that an instance stores: it names the instance, so that every replica finds it again, and
    has a mark of its tenant. No other tenant gets it by that id, and by no other one, which no instance has.

    Clients put it into a path, with its characters escaped or not, and engines split that path when it is decoded: so
    no character of a client's id is left in it that means something there, but ``~`` and two digits.
    """
    named = _NO_PART_OF_A_NAME.sub(lambda found: b"~%02X" % found[0][0], request_id.encode("utf-8", "surrogatepass"))
    return f"resp_{named.decode()}{_mark_of(tenant)}@{instance_id}"


def _mark_of(tenant: str) -> str:
    """A tilde and a ``t``, which stand in no other place of an id, and the tenant's name as a hash."""
    return f"~t{xxh3_64_hexdigest(tenant.encode())}" if tenant else ""


def is_response_of(response: str, caller: Caller | None) -> bool:
    """Whether such an id is one of the tenant's own responses; one without a mark is of those without a tenant."""
    mark = _MARK.search(response)
    return (mark[1] if mark is not None else "") == ("" if caller is None else _mark_of(caller.tenant.name))


def is_marked_for_another(response: str, caller: Caller | None) -> bool:
    """Whether such an id has the mark of a tenant that is not the caller's."""
    return _MARK.search(response) is not None and not is_response_of(response, caller)


def request_of_response(response: str) -> str:
    """The request that ``response_id`` made this id for; nonsense for any other."""
    named = _MARK.sub("@", response).removeprefix("resp_").rpartition("@")[0]
    return unquote(named.replace("~", "%"), errors="surrogatepass")


def storing_instance(previous_response_id: object) -> str | None:
    """The instance that such an id names; None for any other."""
    if not isinstance(previous_response_id, str):
        return None
    _, at, instance_id = previous_response_id.rpartition("@")
    return instance_id if at and instance_id else None
