"""The bodies of the two legs of a split request, made from the client's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from dualmap.api_bodies.json_body import read_json, write_json
from dualmap.router.http.body_edits import BodyPart

_LIMITS: Final = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens", "min_tokens"),
    "/v1/completions": ("max_tokens", "min_tokens"),
}
_ONE_TOKEN: Final = {
    path: b'"stream":false,"stream_options":null,' + b"".join(b'"%b":1,' % name.encode() for name in names)
    for path, names in _LIMITS.items()
}


def prefill_body(path: str, body: bytes, params: bytes, fields: bytes = b"") -> list[BodyPart]:
    """One token, not streamed: with ``min_tokens`` it ends by its length in any case, and no other end stages KV.
    ``params`` is JSON, and so are more ``fields``, with a comma behind each.

    All of them are added at the end, where they stand for those of the same name before, as for any reader: a long
    prompt is neither parsed nor copied. The body must be a JSON object that has fields.
    """
    added = b',%b%b"kv_transfer_params":%b}' % (_ONE_TOKEN[path], fields, params)
    return [memoryview(body)[: body.rindex(b"}")], added]


def params_field(params: Mapping[str, Any]) -> bytes:
    """The field of a decode leg's body that says where the KV is, as JSON."""
    return b'"kv_transfer_params":%b' % orjson.dumps(params)


def freeing_body(path: str, parts: list[BodyPart], params: Mapping[str, Any] | None) -> bytes:
    """A decode leg that only takes its KV over: one token, which no client gets. Without ``params``, the body says
    where the KV is."""
    value = read_json(b"".join(parts))
    value.pop("stream_options", None)
    wanted: dict[str, Any] = {**dict.fromkeys(_LIMITS[path], 1), "stream": False}
    if params is not None:
        wanted["kv_transfer_params"] = params
    return write_json(value | wanted)


def transfer_params(answer: bytes) -> dict[str, Any] | None:
    """The KV transfer params in the answer of a prefill leg, handed on as they are; None: nothing was staged.

    Raises:
        ValueError: it is not an answer.
    """
    value = orjson.loads(answer)
    if not isinstance(value, dict) or "choices" not in value:
        raise ValueError("not a completion")
    params = value.get("kv_transfer_params")
    return params if isinstance(params, dict) else None
