"""Checks of a request before it is placed: the key, the method, the shape of its body."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from dualmap.api_bodies.json_body import UnreadableJsonError, read_json
from dualmap.api_bodies.lax_values import lax_bool, lax_int
from dualmap.api_bodies.prompt import MAX_PARTS, LongTexts
from dualmap.router.answers.fields import GIVEN_BACK_REASON
from dualmap.router.answers.rest import answers_of, prompts_of, why_not_continued
from dualmap.router.errors import (
    ForbiddenPathError,
    MethodNotAllowedError,
    NotFoundError,
    TokenKeysComingError,
    UnsupportedEncodingError,
    beginning_of,
)
from dualmap.router.http.doubled_fields import CLASS_FIELDS, RULED_FIELDS, doubled_fields
from dualmap.router.http.form_fields import FormField, UnreadableFormError, form_fields
from dualmap.router.http.paths import (
    FILES_PATH,
    INFERENCE_PATHS,
    forbidden_path_finder,
    is_inference,
    methods_of,
    needs_api_key,
    stored_response_id,
)
from dualmap.router.http.request_reader import ClientRequest, HeadCheck
from dualmap.router.http.steering import EXTRA_ARGS, REPORT_KEY, SAMPLING, TRANSFER_KEYS, may_steer, overriding_fields
from dualmap.router.prompts.inference_request import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    COMPLETIONS_PATHS,
    CONTINUING_PATHS,
    POOLED_PATHS,
    RESPONSES_PATH,
    SCHEDULED_PATHS,
    InferenceRequest,
    SentPrompt,
    TokenSource,
    is_marked_for_another,
    is_response_of,
    storing_instance,
)
from dualmap.router.prompts.prompt import count_in, sent_prompt, shows_its_text
from dualmap.router.prompts.run_identity import run_of
from dualmap.router.prompts.token_bounds import passed_on_tokens, unread_tokens
from dualmap.router.steps import without_pause
from dualmap.router.tenants.directory import TenantDirectory
from dualmap.router.tenants.signed_tokens import FETCH_TIMEOUT_S
from dualmap.runtime.own_random import own_random
from dualmap.scheduling.prompts.blocks import TextPrompt
from dualmap.scheduling.settings import MAX_SLO_S

log = logging.getLogger(__name__)

OPS_BODY_BYTES: Final = 512 << 10
FORM_BYTES: Final = 64 << 10
"""What a form may have beside its file."""
"""Largest body of a request that the ASGI app serves: the app parses it at once, in any shape."""

UNKNOWN_CALLER_BYTES: Final = 4 << 20
"""Longest body that waits until its sender is known."""

LONG_BODY_BYTES: Final = 64 << 10
"""Reading any body up to this takes a few milliseconds at most, in any shape."""
MAX_PROMPT_PARTS: Final = 10_000
"""Messages, content parts, prompts or tools of a request, of each."""

_NO_LONG_TEXTS: Final[LongTexts] = {}
_NONE_DOUBLED: Final[frozenset[str]] = frozenset()
_NOT_SPLIT: Final = frozenset({"echo", "prompt_logprobs", "use_beam_search"})
"""Fields with which an answer needs the computed prompt itself."""
_SCORED: Final = frozenset({"echo", "prompt_logprobs"})
"""Fields with which an engine may have to compute all of a prompt."""
_STEERING: Final = frozenset({*TRANSFER_KEYS, REPORT_KEY, *EXTRA_ARGS, SAMPLING})

_ANSWERS: Final = frozenset({"n", "best_of"})
_MOST_ANSWERS: Final = 1 << 20
_MODEL_BYTES: Final = 1024
"""Bytes of a model's name that are looked at where it was left out of its body for its length."""
"""More are counted as so many; no engine computes them."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")


def make_head_check(
    tenants: TenantDirectory, *, max_body_bytes: int, max_file_bytes: int = 0, forbidden_paths: Iterable[str] = ()
) -> HeadCheck:
    """The rule for heads: who may send what, and how long a body may follow. ``max_file_bytes``: of a file that a
    client uploads; 0: none takes files."""
    is_forbidden = forbidden_path_finder(forbidden_paths)

    def check_head(request: ClientRequest) -> int:
        path, method = request.path, request.method
        known = path in INFERENCE_PATHS
        inference = known or is_inference(path)
        if not (known and method == "POST"):
            if method == "OPTIONS":  # a browser sends no key with it
                return OPS_BODY_BYTES
            if method == "CONNECT":
                raise MethodNotAllowedError("this is not a forward proxy: CONNECT is not supported")
            if inference and method not in _allowed(path):
                raise MethodNotAllowedError(f"{path} takes {' or '.join(_allowed(path))}, not {method}")
        if tenants.is_closed and (inference or needs_api_key(path)):
            caller = request.caller = tenants.by_key(request.get)
            if caller is None:
                find_caller(request, tenants)
        if inference:
            if is_forbidden(path):
                raise ForbiddenPathError(
                    f"{path} is not passed on, as router.forbidden_paths says; send it to the instance itself"
                )
            return max_body_bytes if request.caller_known is None else min(max_body_bytes, UNKNOWN_CALLER_BYTES)
        if (encoding := content_encoding(request)) is not None:
            raise UnsupportedEncodingError(f"content-encoding {encoding} is not supported; send the body as it is")
        if path == FILES_PATH and method == "POST" and max_file_bytes:
            request.streams = True
            return max_file_bytes + FORM_BYTES
        return min(OPS_BODY_BYTES, max_body_bytes)

    return check_head


def find_caller(request: ClientRequest, tenants: TenantDirectory) -> None:
    """Find out who sends a request. Where the key that signed its token is being fetched, it waits for that, unless its
    body is long: see ``wait_for_caller``.

    Raises:
        RouterError: nobody who may.
    """
    try:
        request.caller = tenants.caller(request.get, from_gateway=request.from_gateway, count=request.count)
    except TokenKeysComingError as coming:
        length = request.get(b"content-length") or b"0"
        if coming.fetched is None or not length.isdigit() or int(length) > UNKNOWN_CALLER_BYTES:
            raise
        request.caller_known = coming.fetched


async def wait_for_caller(request: ClientRequest, tenants: TenantDirectory) -> None:
    """Wait for the keys by which the token of a request can be verified; then find out who sends it.

    Raises:
        RouterError: nobody who may; or the keys do not come in time.
    """
    assert request.caller_known is not None
    await asyncio.wait((request.caller_known,), timeout=FETCH_TIMEOUT_S)
    request.caller_known = None
    request.caller = tenants.caller(request.get, from_gateway=request.from_gateway, count=request.count)


def refusing_inference(check_head: HeadCheck, why: str) -> HeadCheck:
    """The rule for heads at a port that is for operation alone; ``why`` says where inference goes."""

    def check(request: ClientRequest) -> int:
        if is_inference(request.path):
            raise NotFoundError(why)
        return check_head(request)

    return check


def content_encoding(request: ClientRequest) -> str | None:
    """How the body is compressed; None where it is not."""
    encoding = request.get(b"content-encoding")
    if encoding is not None and request.count(b"content-encoding") > 1:
        encoding = b", ".join([value for name, value in request.fields if name == b"content-encoding"])
    if encoding is None or encoding.strip().lower() in (b"", b"identity"):
        return None
    return encoding.decode("latin-1")


def _allowed(path: str) -> list[str]:
    return methods_of(path).split(", ")[:-1]


def read_at_once(request: ClientRequest, request_id: str, trusts_transfers: bool = False) -> InferenceRequest | None:
    """The inference request of a client, whatever its path; None where ``LongBodies`` has to read its body, in steps.

    Raises:
        NotFoundError: it is for a stored response that no instance of this fleet has.
    """
    if stored_response_id(request.path) is not None:
        return read_stored_request(request, request_id)
    if is_form(request):
        return read_form_request(request, request_id, trusts_transfers=trusts_transfers)
    if len(request.body) > LONG_BODY_BYTES:
        return None
    return read_inference_request(request, request_id, max_parts=MAX_PROMPT_PARTS, trusts_transfers=trusts_transfers)


def read_stored_request(request: ClientRequest, request_id: str) -> InferenceRequest:
    """The request of a client that names a stored response in the path: the response's instance answers.

    Raises:
        NotFoundError: the id does not name an instance.
    """
    response = stored_response_id(request.path)
    instance_id = storing_instance(response)
    if instance_id is None or not is_response_of(response or "", request.caller):
        raise _no_response(response)
    stream = b"stream=true" in request.query.lower()
    return InferenceRequest(
        request_id, "", request.path, None, None, stream, body_hash=xxh3_64_intdigest(request.path.encode()),
        pinned_to=instance_id,
    )  # fmt: skip


def _no_response(response: str | None) -> NotFoundError:
    """The error is the same for a response that does not exist and for another tenant's."""
    return NotFoundError(f"response {response!r} not found: only ids that this fleet gave you lead to one")


def read_inference_request(
    request: ClientRequest, request_id: str, *, max_parts: int = MAX_PARTS, trusts_transfers: bool = False
) -> InferenceRequest:
    """The request of a client, read from its complete HTTP request; for bodies that are not long."""
    try:
        if request.get(b"content-encoding") is not None:
            check_encoding(request)
        body, caller = json_object(request.body), request.caller
        doubled = _NONE_DOUBLED if caller is None else doubled_fields(request.body, body, caller)
    except UnreadableJsonError as error:
        read = unread_request(request, request_id, error.reason)
        read.may_steer = without_pause(may_steer(request.body, trusts_transfers=trusts_transfers))
        return read
    path = request.path
    prompt = sent_prompt(path, body, max_parts=max_parts) if path in SCHEDULED_PATHS else None
    read = inference_request_of(request, request_id, body, prompt, trusts_transfers=trusts_transfers)
    if doubled:
        read.doubled = doubled
    return read


def check_encoding(request: ClientRequest) -> None:
    """Raises UnreadableJsonError where the body is compressed."""
    if (encoding := content_encoding(request)) is not None:
        raise UnreadableJsonError(f"the body is compressed ({encoding})")


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, parsed at once.

    Raises:
        UnreadableJsonError: it is not one.
    """
    if not body:
        raise UnreadableJsonError("the request has no body")
    try:
        value = read_json(body)
    except UnreadableJsonError as error:
        raise UnreadableJsonError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnreadableJsonError("the body is no JSON object")
    return value


def token_source(path: str, body: bytes, prompt: TextPrompt) -> TokenSource:
    """The source of a prompt's tokens, of a body that was read without an object for each message."""
    return TokenSource(path, json_object(body), {}, prompt)


def unread_request(request: ClientRequest, request_id: str, why: str, model: str = "") -> InferenceRequest:
    """A request of whose body nothing is known, except perhaps the model: it is passed on as it came."""
    return InferenceRequest(
        request_id,
        model,
        request.path,
        None,
        _slo_s(request),
        stream=False,
        body_hash=xxh3_64_intdigest(request.body),
        unread=why,
        token_bounds=unread_tokens(request.path, len(request.body)),
    )


def is_form(request: ClientRequest) -> bool:
    media_type = request.get(b"content-type")
    return media_type is not None and media_type.lower().startswith(b"multipart/form-data")


def read_form_request(request: ClientRequest, request_id: str, *, trusts_transfers: bool = False) -> InferenceRequest:
    """The request of a client that sent a form, of which the fields are read that a rule is about."""
    body = request.body
    read = InferenceRequest(
        request_id,
        "",
        request.path,
        None,
        _slo_s(request),
        stream=False,
        form=True,
        body_hash=xxh3_64_intdigest(body),
        token_bounds=unread_tokens(request.path, len(body), form=True),
    )
    try:
        if (encoding := content_encoding(request)) is not None:
            raise UnreadableFormError(f"the body is compressed ({encoding})")
        fields = form_fields(body, request.get(b"content-type") or b"")
        for each in fields:
            _read_form_field(body, read, each, trusts_transfers=trusts_transfers)
    except (UnreadableFormError, UnicodeDecodeError) as error:
        read.unread, read.model, read.form_edits = str(error), "", ()
        charset = re.search(rb"charset(?!=\"?utf-8)", request.get(b"content-type") or b"", re.IGNORECASE)
        read.may_steer = charset is not None or without_pause(may_steer(body, trusts_transfers=trusts_transfers))
        return read
    read.doubled = frozenset(
        name for name, count in Counter(each.name for each in fields).items() if count > 1 and name in RULED_FIELDS
    )
    return read


def _read_form_field(body: bytes, read: InferenceRequest, field: FormField, *, trusts_transfers: bool) -> None:
    """Read a field of a form that a rule is about; of those of a name the last one counts."""
    if field.name == "model":
        if field.is_file:
            raise UnreadableFormError("the model of the form is a file")
        read.model, read.model_span = body[slice(*field.span)].decode(), field.span
    elif field.name == "priority":
        read.names_priority, read.priority_span = True, field.span
    elif field.name in _STEERING:
        text = body[slice(*field.span)]
        try:
            said = {field.name: read_json(text)}
        except UnreadableJsonError:
            said = {field.name: text.decode("utf-8", "replace")}
        if overriding_fields(said, _NO_LONG_TEXTS, trusts_transfers=trusts_transfers):
            read.form_edits = (*read.form_edits, (field.part, b""))


def inference_request_of(
    request: ClientRequest,
    request_id: str,
    body: dict[str, Any],
    prompt: SentPrompt | None,
    long_texts: LongTexts = _NO_LONG_TEXTS,
    *,
    trusts_transfers: bool = False,
) -> InferenceRequest:
    """The request of a client, read from its HTTP request, the object that its body is and the prompt in it. No field
    of the body is judged here: one that cannot be read counts as absent."""
    path = request.path
    if path in CONTINUING_PATHS:
        check_responses(request, body)
    read = said_by(path, body, prompt, long_texts, trusts_transfers=trusts_transfers)
    read.request_id = request_id
    if prompt is None:
        salt = body.get("cache_salt")
        read.body_hash = xxh3_64_intdigest(request.body)
        read.sent_salt = salt if isinstance(salt, str) else None
        read.token_bounds = passed_on_tokens(path, body, len(request.body))
    read_head(read, request, body)
    return read


def read_head(read: InferenceRequest, request: ClientRequest, body: Mapping[str, Any]) -> None:
    """Read what depends on a request's header, too."""
    read.slo_s = _slo_s(request)
    if "request_id" in body:
        read.request_id = _id_in(request, body) or read.request_id
    asked_class = request.get(b"x-dualmap-priority")
    if asked_class is not None or not CLASS_FIELDS.isdisjoint(body):
        _read_class(read, asked_class, body)
    if (revision := request.get(b"x-dualmap-revision")) is not None:
        read.asked_revision = revision.decode("latin-1").strip()
    if read.prompt is not None:
        read.prompt.tenant = "" if request.caller is None else request.caller.tenant.name
        read.run = run_of(request.fields, body)


def said_by(
    path: str,
    body: Mapping[str, Any],
    prompt: SentPrompt | None,
    long_texts: LongTexts = _NO_LONG_TEXTS,
    *,
    trusts_transfers: bool = False,
) -> InferenceRequest:
    """The request as far as it follows from its body, without an id."""
    model, stream = body.get("model"), lax_bool(body.get("stream")) is True
    if isinstance(model, str) and model in long_texts:  # so long that it is no model's name
        model = beginning_of(long_texts[model][:_MODEL_BYTES].decode("utf-8", "replace"))
    read = InferenceRequest("", model if isinstance(model, str) else "", path, prompt, None, stream=stream)
    if not _STEERING.isdisjoint(body):
        read.overrides = overriding_fields(body, long_texts, trusts_transfers=trusts_transfers)
    if path == RESPONSES_PATH and "background" in body:
        read.in_background = bool(lax_bool(body["background"]))
    if prompt is None:
        return read
    read.shows_prompt = shows_its_text(body)
    if path in COMPLETIONS_PATHS and not _SCORED.isdisjoint(body) and _scores_prompt(path, body):
        prompt.pooled = True
    if "truncate_prompt_tokens" in body and path in COMPLETIONS_PATHS:
        read.truncates_to = count_in(body, "truncate_prompt_tokens")
    read.leaves_load_open = not (trusts_transfers and body.get("kv_transfer_params")) and path not in POOLED_PATHS
    if path in COMPLETIONS_PATHS:
        if stream:
            read.leaves_usage_open = "stream_options" not in body
            read.refuses_usage = not read.leaves_usage_open and _refuses_usage(body["stream_options"])
            read.leaves_ids_open = body.get("return_token_ids") is None
        is_split = may_split(path, body, prompt.output_limit)
        read.may_split = is_split and not (trusts_transfers and body.get("kv_transfer_params"))
        if path == COMPLETIONS_PATH:
            read.prompts = read.computed_answers = prompts_of(path, body)
        if not _ANSWERS.isdisjoint(body):
            read.computed_answers = _computed_answers(path, body)
        if "stop" in body:
            stop = body["stop"]
            read.stops_at_mark = stop == GIVEN_BACK_REASON or (isinstance(stop, list) and GIVEN_BACK_REASON in stop)
    elif path == RESPONSES_PATH:
        read.leaves_id_open = "request_id" not in body
        read.stores = body.get("store") is not False
        previous = body.get("previous_response_id")
        read.pinned_to = storing_instance(previous)
        read.continues = previous if read.pinned_to is not None else None
    if stream:
        read.answers = answers_of(path, body)
        read.not_continued = why_not_continued(path, body, read.answers)
    return read


def _scores_prompt(path: str, body: Mapping[str, Any]) -> bool:
    """Whether an engine computes the log probabilities of all of a prompt, and looks at no cache for that. Chats have
    ``top_logprobs`` by default."""
    if body.get("prompt_logprobs") is not None:
        return True
    return lax_bool(body.get("echo")) is True and (path == CHAT_PATH or body.get("logprobs") is not None)


def _id_in(request: ClientRequest, body: Mapping[str, Any]) -> str | None:
    """The request's id by its body; None where that has none. Engines take it from the header, and else from the body;
    a response's id is another one."""
    if request.path == RESPONSES_PATH or request.get(b"x-request-id") is not None:
        return None
    named = body["request_id"]
    return named if isinstance(named, str) and _REQUEST_ID.fullmatch(named) is not None else None


def _read_class(read: InferenceRequest, asked: bytes | None, body: Mapping[str, Any]) -> None:
    """Read the priority class that a request asks for, by its header or by fields of its body that are not null."""
    tier, priority = body.get("service_tier"), body.get("priority")
    if tier is None and priority is None and asked is None:
        return
    read.asked_class = None if asked is None else asked.decode("latin-1").strip()
    read.service_tier = tier if isinstance(tier, str) else None
    read.sent_priority = priority if type(priority) is int else None
    read.names_priority = "priority" in body


def check_responses(request: ClientRequest, body: Mapping[str, Any]) -> None:
    """Refuse a body that continues another tenant's stored response, or would be stored under its id.

    Raises:
        NotFoundError: it does.
    """
    own, previous = body.get("request_id"), body.get("previous_response_id")
    if isinstance(own, str) and is_marked_for_another(own, request.caller):
        raise _no_response(own)
    if isinstance(previous, str) and not is_response_of(previous, request.caller):
        raise _no_response(previous)


def _computed_answers(path: str, body: Mapping[str, Any]) -> int:
    """The number of answers that a request with fields for it has computed: of ``best_of`` the client gets only
    some."""
    each = max(1, *[lax_int(body.get(name)) or 1 for name in _ANSWERS])
    return min(each, _MOST_ANSWERS) * prompts_of(path, body)


def _refuses_usage(options: object) -> bool:
    """Whether a stream with these options has no usage, by what its client wrote."""
    return options is None or (isinstance(options, dict) and not lax_bool(options.get("include_usage")))


def _is_one_answer(body: Mapping[str, Any]) -> bool:
    """Whether a chat, or a completion, asks for one answer to one prompt."""
    if not _ANSWERS.isdisjoint(body) and any(
        body.get(name) is not None and lax_int(body[name]) != 1 for name in _ANSWERS
    ):
        return False
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))


def may_split(path: str, body: Mapping[str, Any], limit: int | None) -> bool:
    """Whether one instance can prefill the request's prompt and another one answer it: one prompt, one answer of more
    than a token. ``limit``: the most tokens of its answer; None: it sets no limit."""
    if path not in COMPLETIONS_PATHS or limit in (0, 1):
        return False
    if not _NOT_SPLIT.isdisjoint(body) and any(map(body.get, _NOT_SPLIT)):
        return False
    return _is_one_answer(body)


def mint_request_id() -> str:
    """A request id that no other replica mints; it need not be secret."""
    return f"{own_random.getrandbits(128):032x}"


def read_request_id(header: str | None) -> str:
    """The client's ``x-request-id``, or a minted one where there is none that can be used.

    Of several, as proxies join them, the first counts. One of over 128 characters, or with others than
    ``A-Za-z0-9_.:@/+=-``, is replaced, and the log says by what.
    """
    if not header:
        return mint_request_id()
    if _REQUEST_ID.fullmatch(header) is not None:
        return header
    first = _first(header)
    if _REQUEST_ID.fullmatch(first) is not None:
        log.debug("request %s: its x-request-id was %.300r", first, header)
        return first
    minted = mint_request_id()
    log.info("request %s: its x-request-id was %.300r, which cannot be used", minted, header)
    return minted


def _first(header: str) -> str:
    """The first value of a field that proxies may have joined."""
    return header.partition(",")[0].strip()


def read_slo_s(header: str | None) -> float | None:
    """The TTFT SLO of ``x-slo-ttft-ms``, which llm-d names otherwise, in seconds, to the millisecond; one of over an
    hour counts as an hour.

    None where there is none, or none that is a time above 0.
    """
    if header is None:
        return None
    try:
        slo_ms = float(_first(header))
    except ValueError:
        slo_ms = 0.0
    if not slo_ms > 0.0:
        log.info(
            "x-slo-ttft-ms was %.100r, which is no time in milliseconds: the request has no SLO of its own", header
        )
        return None
    return max(1, round(min(slo_ms, MAX_SLO_S * 1000))) / 1000


def _slo_s(request: ClientRequest) -> float | None:
    slo = request.get(b"x-slo-ttft-ms") or request.get(b"x-llm-d-slo-ttft-ms")
    return read_slo_s(slo.decode("latin-1")) if slo is not None else None
