"""The ``cache_salt`` of a tenant in the bodies of its requests, in place of what its client sends."""

from __future__ import annotations

from typing import Final

from dualmap.router.errors import InvalidRequestError
from dualmap.router.http.added_fields import BLANK
from dualmap.router.http.admission import content_encoding
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import SCHEDULED_PATHS, InferenceRequest
from dualmap.router.tenants.cache_salts import CacheSalts

SALTED_PATHS: Final = SCHEDULED_PATHS | {
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/v1/chat/completions/batch",
    "/v1/systemone",
}
"""The paths whose bodies vLLM takes a ``cache_salt`` in."""


def separate(request: ClientRequest, read: InferenceRequest, salts: CacheSalts) -> None:
    """Have the instance, and the fleet's own books, keep the KV cache of a tenant's request apart.

    Raises:
        InvalidRequestError: its body is no JSON object as it stands, so no salt can be set.
    """
    caller = request.caller
    if caller is None or request.path not in SALTED_PATHS or request.method != "POST":
        return
    salt = salts.of(caller.tenant, _sent_salt(read))
    if salt is None:
        return
    if read.form or content_encoding(request) is not None or not request.body.rstrip(BLANK).endswith(b"}"):
        raise InvalidRequestError(
            f"the KV cache of tenant {caller.tenant.name} is its own, which a field of the body says:"
            " send the body as a JSON object, and not compressed"
        )
    read.cache_salt = salt
    if read.prompt is not None:
        read.prompt.salt = salt


def _sent_salt(read: InferenceRequest) -> str | None:
    """The salt by which the client separates its request. A body that is not read separates it from all others."""
    if read.prompt is not None:
        return read.prompt.salt
    return f"body {read.body_hash}" if read.unread else read.sent_salt
