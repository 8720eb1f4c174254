"""What is asked of a request before anything is placed: the key, the method, the shape of its body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from xxhash import xxh3_64_intdigest

from router.api_keys import ApiKeys
from router.errors import InvalidRequestError, MethodNotAllowedError, UnsupportedEncodingError
from router.http.model_field import form_model
from router.http.paths import is_inference, needs_api_key
from router.http.request_reader import HeadCheck, Request
from router.inference_request import InferenceRequest, read_count, read_slo_s

OPS_BODY_BYTES: Final = 1 << 20
"""Largest body of a request that the ASGI app serves."""

_PROMPT_FIELDS: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_COUNTS: Final = ("max_tokens", "max_completion_tokens", "n")


def make_head_check(keys: ApiKeys, *, max_body_bytes: int) -> HeadCheck:
    """The rule for heads: who may send what, and how long a body may follow."""

    def check_head(request: Request) -> int:
        if request.method == "CONNECT":
            raise MethodNotAllowedError("this is no forward proxy: CONNECT is not supported")
        inference = is_inference(request.path)
        if request.method == "OPTIONS":  # a browser sends no key with it
            return OPS_BODY_BYTES
        if inference and request.method != "POST":
            raise MethodNotAllowedError(f"{request.path} takes POST, not {request.method}")
        if needs_api_key(request.path):
            keys.check(request.get)
        encoding = request.get(b"content-encoding")
        if encoding is not None and encoding.lower() not in (b"", b"identity"):
            named = encoding.decode("latin-1")
            raise UnsupportedEncodingError(f"content-encoding {named} is not supported; send the body as it is")
        return max_body_bytes if inference else min(OPS_BODY_BYTES, max_body_bytes)

    return check_head


def read_inference_request(request: Request, request_id: str) -> InferenceRequest:
    """What a client asks for, from its complete HTTP request.

    Raises:
        InvalidRequestError: the body is not JSON of the right shape, or a header is malformed; names the field.
    """
    slo = request.get(b"x-slo-ttft-ms")
    slo_s = read_slo_s(slo.decode("latin-1") if slo is not None else None)
    media_type = (request.get(b"content-type") or b"application/json").lower()
    if media_type.startswith(b"multipart/form-data"):
        form = request.body
        return InferenceRequest(
            request_id,
            form_model(form),
            request.path,
            {},
            len(form),
            slo_s,
            stream=False,
            form=True,
            body_hash=xxh3_64_intdigest(form),
        )
    body = _json_object(request.body)
    model = body.get("model")
    scheduled_field = _PROMPT_FIELDS.get(request.path)
    if scheduled_field is not None:
        _check_prompt(body, scheduled_field)
    if model is not None and not isinstance(model, str):
        raise InvalidRequestError("model must be a string", param="model")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise InvalidRequestError("stream must be true or false", param="stream")
    return InferenceRequest(
        request_id,
        model or "",
        request.path,
        body,
        len(request.body),
        slo_s,
        stream=bool(stream),
        body_hash=xxh3_64_intdigest(request.body) if scheduled_field is None else 0,
        leaves_usage_open=scheduled_field is not None and bool(stream) and "stream_options" not in body,
    )


def _json_object(body: bytes) -> Mapping[str, Any]:
    if not body:
        raise InvalidRequestError("the request has no body; send a JSON object")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return value


def _check_prompt(body: Mapping[str, Any], name: str) -> None:
    """Types that scheduling reads; everything else is the instance's to judge."""
    value = body.get(name)
    if name == "prompt" and not value and body.get("prompt_embeds"):
        name, value = "prompt_embeds", body["prompt_embeds"]
    if value is None:
        raise InvalidRequestError(f"the body has no {name}", param=name)
    if name == "messages":
        if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
            raise InvalidRequestError("messages must be a non-empty array of objects", param=name)
    elif not isinstance(value, str | list) or not value:
        raise InvalidRequestError(f"{name} must be a non-empty string or array", param=name)
    for count in _COUNTS:
        read_count(body, count)
