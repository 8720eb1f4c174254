"""Checks of a request before it is placed: the key, the method, the shape of its body."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from random import Random
from typing import Any, Final

import orjson
from xxhash import xxh3_64_intdigest

from router.api_keys import ApiKeys
from router.errors import InvalidRequestError, MethodNotAllowedError, NotFoundError, UnsupportedEncodingError
from router.http.model_field import form_model
from router.http.paths import INFERENCE_PATHS, is_inference, methods_of, needs_api_key, stored_response_id
from router.http.request_reader import HeadCheck, Request
from router.inference_request import (
    COMPLETIONS_PATHS,
    RESPONSES_PATH,
    SCHEDULED_PATHS,
    InferenceRequest,
    storing_instance,
)
from router.prompt import sent_prompt
from scheduling.prompt import MAX_PARTS, LongTexts
from scheduling.settings import MAX_SLO_S

OPS_BODY_BYTES: Final = 512 << 10
"""Largest body of a request that the ASGI app serves: the app parses it at once, in any shape."""

_NO_LONG_TEXTS: Final[LongTexts] = {}
_NOT_SPLIT: Final = ("echo", "prompt_logprobs", "use_beam_search", "kv_transfer_params")
"""Fields with which an answer needs the computed prompt itself, or with which the client transfers KV on its own."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")
_random = Random(os.urandom(32))


def make_head_check(keys: ApiKeys, *, max_body_bytes: int) -> HeadCheck:
    """The rule for heads: who may send what, and how long a body may follow."""

    check_key = keys.check if keys else None

    def check_head(request: Request) -> int:
        path, method = request.path, request.method
        inference = path in INFERENCE_PATHS or is_inference(path)
        if method == "OPTIONS":  # a browser sends no key with it
            return OPS_BODY_BYTES
        if method == "CONNECT":
            raise MethodNotAllowedError("this is not a forward proxy: CONNECT is not supported")
        if inference and not (method == "POST" and path in INFERENCE_PATHS) and method not in _allowed(path):
            raise MethodNotAllowedError(f"{path} takes {' or '.join(_allowed(path))}, not {method}")
        if check_key is not None and (inference or needs_api_key(path)):
            check_key(request.get)
        encoding = request.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in (b"", b"identity"):
            named = encoding.decode("latin-1")
            raise UnsupportedEncodingError(f"content-encoding {named} is not supported; send the body as it is")
        return max_body_bytes if inference else min(OPS_BODY_BYTES, max_body_bytes)

    return check_head


def _allowed(path: str) -> list[str]:
    return methods_of(path).split(", ")[:-1]


def read_stored_request(request: Request, request_id: str) -> InferenceRequest:
    """What a client asks for who names a stored response in the path: its instance answers.

    Raises:
        NotFoundError: the id does not name an instance.
    """
    response = stored_response_id(request.path)
    instance_id = storing_instance(response)
    if instance_id is None:
        raise NotFoundError(f"response {response!r} not found: only ids that this fleet gave lead to a stored response")
    stream = b"stream=true" in request.query.lower()
    return InferenceRequest(
        request_id, "", request.path, None, None, stream, body_hash=xxh3_64_intdigest(request.path.encode()),
        pinned_to=instance_id,
    )  # fmt: skip


def read_inference_request(request: Request, request_id: str, *, max_parts: int = MAX_PARTS) -> InferenceRequest:
    """What a client asks for, from its complete HTTP request; for bodies that are not long.

    Raises:
        InvalidRequestError: the body is not JSON of the right shape, or a header is malformed; names the field.
    """
    if not request.body:
        raise InvalidRequestError("the request has no body; send a JSON object")
    return inference_request_of(request, request_id, json_object(request.body), _NO_LONG_TEXTS, max_parts=max_parts)


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body, parsed at once.

    Raises:
        InvalidRequestError: it is not one.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def is_form(request: Request) -> bool:
    media_type = request.get(b"content-type")
    return media_type is not None and media_type.lower().startswith(b"multipart/form-data")


def read_form_request(request: Request, request_id: str) -> InferenceRequest:
    """The same for a form, of which only the name of the model is read."""
    model = form_model(request.body)
    return InferenceRequest(
        request_id,
        model,
        request.path,
        None,
        _slo_s(request),
        stream=False,
        form=True,
        body_hash=xxh3_64_intdigest(request.body),
    )


def inference_request_of(
    request: Request, request_id: str, body: dict[str, Any], long_texts: LongTexts, *, max_parts: int
) -> InferenceRequest:
    """What a client asks for, from its request and the object that its body is."""
    path, model, stream = request.path, body.get("model"), body.get("stream")
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("model must be a string", param="model")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequestError("stream must be true or false", param="stream")
    prompt = sent_prompt(path, body, long_texts, max_parts=max_parts) if path in SCHEDULED_PATHS else None
    read = InferenceRequest(
        request_id,
        model or "",
        path,
        prompt,
        _slo_s(request),
        stream=bool(stream),
        body_hash=0 if prompt is not None else xxh3_64_intdigest(request.body),
        leaves_usage_open=bool(stream) and path in COMPLETIONS_PATHS and "stream_options" not in body,
        may_split=prompt is not None and may_split(path, body),
    )
    if path == RESPONSES_PATH:
        read.leaves_id_open = "request_id" not in body
        read.stores = body.get("store") is not False
        previous = body.get("previous_response_id")
        read.pinned_to = storing_instance(previous)
        read.continues = previous if read.pinned_to is not None else None
    return read


def may_split(path: str, body: Mapping[str, Any]) -> bool:
    """Whether one instance can prefill the request's prompt and another one answer it: one prompt, one answer of more
    than a token."""
    if path not in COMPLETIONS_PATHS or any(map(body.get, _NOT_SPLIT)):
        return False
    if body.get("n") not in (None, 1) or (body.get("best_of") or 1) != 1:
        return False
    if 1 in (body.get("max_tokens"), body.get("max_completion_tokens")) or body.get("max_tokens") == 0:
        return False
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or (bool(prompt) and isinstance(prompt[0], int))


def mint_request_id() -> str:
    """A request id that no other replica mints; it need not be secret."""
    return f"{_random.getrandbits(128):032x}"


def read_request_id(header: str | None) -> str:
    """The client's ``x-request-id``, or a minted one when there is none.

    Raises:
        InvalidRequestError: it is longer than 128 characters or has characters outside of ``A-Za-z0-9_.:@/+=-``.
    """
    if not header:
        return mint_request_id()
    if _REQUEST_ID.fullmatch(header) is None:
        raise InvalidRequestError("x-request-id must be 1 to 128 of the characters A-Z a-z 0-9 _ . : @ / + = -")
    return header


def read_slo_s(header: str | None) -> float | None:
    """The TTFT SLO of ``x-slo-ttft-ms`` in seconds, to the millisecond; None when the header is absent.

    Raises:
        InvalidRequestError: not a number of milliseconds above 0 and up to one hour.
    """
    if header is None:
        return None
    try:
        slo_ms = float(header)
    except ValueError:
        slo_ms = 0.0
    if not 0.0 < slo_ms <= MAX_SLO_S * 1000:
        raise InvalidRequestError(f"x-slo-ttft-ms must be milliseconds above 0 and up to {MAX_SLO_S * 1000:.0f}")
    return max(1, round(slo_ms)) / 1000


def _slo_s(request: Request) -> float | None:
    slo = request.get(b"x-slo-ttft-ms")
    return read_slo_s(slo.decode("latin-1")) if slo is not None else None
