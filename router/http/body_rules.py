"""Rules for the body of a request, at both doors: what must have been read of it, and what its client must not say.

What cannot be read of a body is passed on as it came, except where rights of its caller depend on it: those hold only
for what the router and the engine read alike. The engine takes the last of a doubled field, other readers the first or
none, so a field that a right depends on is there once.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualmap.router.errors import InvalidRequestError, RouterError, UnsupportedEncodingError
from dualmap.router.http.admission import content_encoding
from dualmap.router.http.cache_salt import is_salted, separate
from dualmap.router.http.doubled_fields import CLASS_FIELDS, MODEL_FIELDS, SALT_FIELDS, TOKEN_FIELDS
from dualmap.router.http.paths import stored_response_id
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.router.tenants.cache_salts import CacheSalts
from dualmap.scheduling.tenants.tenant import Caller


def apply_body_rules(plane: DataPlane, request: ClientRequest, read: InferenceRequest) -> None:
    """Have the rules hold for a request that was read: refuse it, or set what goes to its instance.

    Raises:
        RouterError: it is refused, with the reason.
    """
    caller, salts = request.caller, plane.cache_salts
    if caller is not None:
        check_rights(request, read, caller, salts)
        if salts is not None:
            separate(request, read, salts)
    if read.may_steer:
        raise InvalidRequestError(
            f"the body says where KV is transferred or how a cache is reported, which is not passed on, and cannot be"
            f" taken out of it: {read.unread}; leave that out"
        )


def check_rights(request: ClientRequest, read: InferenceRequest, caller: Caller, salts: CacheSalts | None) -> None:
    """Refuse a body that was not read as its engine reads it, where a right of its caller depends on it.

    Raises:
        InvalidRequestError: it was not read.
        UnsupportedEncodingError: it is said to be compressed.
    """
    if request.all_differ and not (read.unread or read.doubled or request.hides_body):
        return
    why = _unread_because(request, read)
    if not why and not read.doubled:
        return
    for right, names in _rights(request, caller, salts):
        if why:
            raise _refused(request, caller, right, why)
        if doubled := sorted(read.doubled & names):
            raise _refused(request, caller, right, f"it has the field {doubled[0]!r} more than once")


def _unread_because(request: ClientRequest, read: InferenceRequest) -> str:
    if request.hides_body and stored_response_id(request.path) is None:
        return "the gateway does not send it to the picker (request_body_mode: BUFFERED, or FULL_DUPLEX_STREAMED)"
    if not request.body:
        return ""
    if not read.unread and request.count(b"content-type") > 1:
        return "its content-type is sent more than once"
    return read.unread


def _refused(request: ClientRequest, caller: Caller, right: str, why: str) -> RouterError:
    text = (
        f"tenant {caller.tenant.name} has {right}, which depends on the body, and the router has to read that as the"
        f" engine does: {why}; send one JSON object in UTF-8, or a plain form, not compressed and each field once"
    )
    return UnsupportedEncodingError(text) if content_encoding(request) is not None else InvalidRequestError(text)


def _rights(request: ClientRequest, caller: Caller, salts: CacheSalts | None) -> Iterator[tuple[str, frozenset[str]]]:
    """The rights of a caller that depend on the body of its request, in words, and the fields that they depend on."""
    tenant = caller.tenant
    if tenant.models or tenant.pools:
        yield "models of its own", MODEL_FIELDS
    if tenant.limits_models:
        yield "limits for models", MODEL_FIELDS
    if tenant.limits_tokens:
        yield "limits of tokens", TOKEN_FIELDS
    if tenant.priority_class or caller.priority_class:
        yield "a priority class", CLASS_FIELDS
    if salts is not None and is_salted(request, caller):
        yield "a KV cache of its own", SALT_FIELDS
