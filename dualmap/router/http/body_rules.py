"""Rules for the body of a request, at both doors: what must have been read of it, and what its client must not say.

What cannot be read of a body is passed on as it came, except where rights of its caller depend on it: those hold only
for what the router and the engine read alike. The engine takes the last of a doubled field, other readers the first or
none, so a field that a right depends on is there once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dualmap.router.errors import InvalidRequestError, RouterError, UnsupportedEncodingError
from dualmap.router.http.admission import content_encoding
from dualmap.router.http.cache_salt import is_salted, separate
from dualmap.router.http.doubled_fields import CLASS_FIELDS, MODEL_FIELDS, SALT_FIELDS, TOKEN_FIELDS
from dualmap.router.http.paths import stored_response_id
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import CONTINUING_PATHS, InferenceRequest


def apply_body_rules(plane: DataPlane, request: ClientRequest, read: InferenceRequest) -> None:
    """Have the rules hold for a request that was read: refuse it, or set what goes to its instance.

    Raises:
        RouterError: it is refused, with the reason.
    """
    salts = plane.cache_salts
    if read.unread or read.doubled or request.hides_body or not request.all_differ:
        check_rights(plane, request, read)
    if salts is not None and request.caller is not None:
        separate(request, read, salts)
    if read.may_steer:
        raise InvalidRequestError(
            f"the body says where KV is transferred or how a cache is reported, which is not passed on, and cannot be"
            f" taken out of it: {read.unread}; leave that out"
        )


def check_rights(plane: DataPlane, request: ClientRequest, read: InferenceRequest) -> None:
    """Refuse a body that was not read as its engine reads it, where a right depends on it.

    Raises:
        InvalidRequestError: it was not read.
        UnsupportedEncodingError: it is said to be compressed.
    """
    why = _unread_because(request, read)
    if not why and not read.doubled:
        return
    for right, names in _rights(plane, request):
        if why:
            raise _refused(request, right, why)
        if doubled := sorted(read.doubled & names):
            raise _refused(request, right, f"it has the field {doubled[0]!r} more than once")


def _unread_because(request: ClientRequest, read: InferenceRequest) -> str:
    if request.hides_body and stored_response_id(request.path) is None:
        return "the gateway does not send it to the picker (request_body_mode: BUFFERED, or FULL_DUPLEX_STREAMED)"
    if not request.body:
        return ""
    if not read.unread and request.count(b"content-type") > 1:
        return "its content-type is sent more than once"
    return read.unread


def _refused(request: ClientRequest, right: str, why: str) -> RouterError:
    who = "a client without a tenant" if request.caller is None else f"tenant {request.caller.tenant.name}"
    text = (
        f"{who} has {right}, which depends on the body, and the router has to read that as the"
        f" engine does: {why}; send one JSON object in UTF-8, or a plain form, not compressed and each field once"
    )
    return UnsupportedEncodingError(text) if content_encoding(request) is not None else InvalidRequestError(text)


def _rights(plane: DataPlane, request: ClientRequest) -> Iterator[tuple[str, frozenset[str]]]:
    """The rights that depend on the body of a request, in words, and the fields that they depend on and that must not
    be doubled."""
    caller = request.caller
    if request.path in CONTINUING_PATHS and (caller is not None or plane.tenants.has_tenants):
        yield "access to stored responses of its own alone", _NONE
    if caller is None:
        return
    tenant = caller.tenant
    if tenant.models or tenant.pools or plane.intake.pools.has_owned:
        yield "models of its own", MODEL_FIELDS
    if tenant.limits_models:
        yield "limits for models", MODEL_FIELDS
    if tenant.limits_tokens:
        yield "limits of tokens", TOKEN_FIELDS
    if tenant.priority_class or caller.priority_class:
        yield "a priority class", CLASS_FIELDS
    elif _sets_priorities(plane):  # no higher than the default class: the engine must not take the client's priority
        yield "the default priority class at most", _NONE
    if plane.cache_salts is not None and is_salted(request, caller):
        yield "a KV cache of its own", SALT_FIELDS


def _sets_priorities(plane: DataPlane) -> bool:
    """Whether engines of any pool are told the priorities of classes."""
    schedulings = (pool.scheduling for pool in plane.intake.pools.pools.values())
    return any(each.engine_priorities and each.classes for each in schedulings)


_NONE: Final[frozenset[str]] = frozenset()
