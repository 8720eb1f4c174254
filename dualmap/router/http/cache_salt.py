"""The ``cache_salt`` of a tenant in the bodies of its requests, in place of what its client sends."""

from __future__ import annotations

from dualmap.router.errors import InvalidRequestError
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import SALTED_PATHS, InferenceRequest
from dualmap.router.tenants.cache_salts import CacheSalts
from dualmap.scheduling.tenants.tenant import Caller


def separate(request: ClientRequest, read: InferenceRequest, salts: CacheSalts) -> None:
    """Have the instance, and the fleet's own books, keep the KV cache of a tenant's request apart.

    Raises:
        InvalidRequestError: its body is no JSON object that was read, so no salt can be set.
    """
    caller = request.caller
    if caller is None or not is_salted(request, caller):
        return
    if read.form or read.unread:
        why = read.unread or "it is a form"
        raise InvalidRequestError(
            f"the KV cache of tenant {caller.tenant.name} is its own, which a field of the body says: send the body as"
            f" one JSON object in UTF-8, and not compressed ({why})"
        )
    salt = salts.of(caller.tenant, _sent_salt(read))
    read.cache_salt = salt
    if read.prompt is not None:
        read.prompt.salt = salt


def is_salted(request: ClientRequest, caller: Caller) -> bool:
    """Whether a request needs a salt where tenants are kept apart."""
    return request.path in SALTED_PATHS and request.method == "POST" and not caller.tenant.shares_cache


def _sent_salt(read: InferenceRequest) -> str | None:
    """The salt by which the client separates its request."""
    return read.sent_salt if read.prompt is None else read.prompt.salt
