"""Everything the router refuses or fails with, and the one table that turns it into an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from dualmap.statestore.errors import LimitsUnknownError, StoreError, StoreUnavailableError

LONGEST_RETRY_AFTER_S: Final = 60
"""The longest ``retry-after``. Above it several clients give up or return within seconds; a client that returns after
it is told what is left of its wait. The whole wait is in the message, and in the fields of the limits."""
_SHOWN_CHARS: Final = 128
"""Characters of a name that a message repeats."""
NO_INSTANCE_RETRY_S = 2.0
"""Time after which a health check may have made an instance ready."""

_ANTHROPIC_PATHS: Final = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class RouterError(Exception):
    """Root of the router's errors: an HTTP status with OpenAI's ``type`` and ``code`` for its kind.

    Every message says what the reader can do about it. ``retry_after_s`` is an estimate of when the same request would
    be accepted, in seconds.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.limit_fields: Sequence[tuple[bytes, bytes]] = ()
        """Header fields that tell what is left of the limits of the client's tenant, where that is known."""
        self.request_id: str | None = None
        """The refused request's, where the fleet has given it one; see ``LiveRequest.request_id``."""


class InvalidRequestError(RouterError):
    """The request is malformed; sending it again unchanged cannot help."""

    status, type, code = 400, "invalid_request_error", "invalid_request"


class InvalidApiKeyError(RouterError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"


class InvalidTokenError(RouterError):
    """The client's token (JWT) is not to be trusted; the message says why."""

    status, type, code = 401, "invalid_request_error", "invalid_token"


class UnknownTenantError(RouterError):
    """A token, or the gateway, names an unknown tenant."""

    status, type, code = 403, "permission_error", "unknown_tenant"


class TenantHeaderError(RouterError):
    """The client names a tenant by a header field that the gateway alone may send."""

    status, type, code = 403, "permission_error", "tenant_header"


class ForbiddenPathError(RouterError):
    """The path changes an engine, and is not for its clients."""

    status, type, code = 403, "permission_error", "forbidden_path"


class CertificateRequiredError(RouterError):
    """The client shows no certificate, and the path needs one."""

    status, type, code = 403, "permission_error", "client_certificate_required"


class ReadOnlyError(RouterError):
    """The administrator may only look, and this would be a change."""

    status, type, code = 403, "permission_error", "read_only"


class ForeignPageError(RouterError):
    """A web page from elsewhere calls what is for operators, while that needs no key."""

    status, type, code = 403, "permission_error", "foreign_page"


class AdminClosedError(RouterError):
    """Clients need keys, administration has none, and other machines reach it."""

    status, type, code = 403, "permission_error", "admin_closed"


class NotFoundError(RouterError):
    status, type, code = 404, "invalid_request_error", "not_found"


class UnknownModelError(RouterError):
    """No pool serves the model, or none that the caller may use. Made by ``unknown_model``."""

    status, type, code = 404, "invalid_request_error", "model_not_found"


class MethodNotAllowedError(RouterError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class RequestAbortedError(RouterError):
    """The client has ended the request by its id before its answer began. Not a status that clients repeat."""

    status, type, code = 400, "invalid_request_error", "request_aborted"


class RequestTimeoutError(RouterError):
    """The client took too long to send its request."""

    status, type, code = 408, "invalid_request_error", "request_timeout"


class ConflictError(RouterError):
    """The change does not fit the present state (an instance that is still in use, an id that is taken)."""

    status, type, code = 409, "invalid_request_error", "conflict"


class BodyTooLargeError(RouterError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedEncodingError(RouterError):
    """The body is compressed, which neither replicas nor instances support."""

    status, type, code = 415, "invalid_request_error", "unsupported_encoding"


class RequestQuarantinedError(RouterError):
    """Engines died while they held requests of this prompt."""

    status, type, code = 422, "invalid_request_error", "request_quarantined"


class HeadersTooLargeError(RouterError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class ReplicaFullError(RouterError):
    """This replica has reached a limit: requests, connections, or bytes of bodies."""

    status, type, code = 429, "rate_limit_error", "replica_full"


class QueueFullError(RouterError):
    """A limit on what is held was met, which the operator has set: the queue of every instance that could take the
    request is full, or the request was late for too long."""

    status, type, code = 429, "rate_limit_error", "queue_full"


class RateLimitError(RouterError):
    """A limit of the client's tenant is met."""

    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(
        self, message: str, *, counted: str = "", param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """``counted``: ``requests`` or ``tokens``, which OpenAI's API has as the type where it is known."""
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.counted = counted


class QuotaSpentError(RouterError):
    """A quota of the client's tenant is spent: to try again soon cannot help."""

    status, type, code = 429, "insufficient_quota", "insufficient_quota"


class UpstreamError(RouterError):
    """The instance failed, and so did every retry within the budget."""

    status, type, code = 502, "api_error", "upstream_failed"

    is_unreached = False
    """No instance took the connection: none has seen the request."""


class NoInstanceError(RouterError):
    """No instance is ready."""

    status, type, code = 503, "service_unavailable", "no_instance"


class InstanceStartingError(RouterError):
    """The pool has no instance, and the one that was started for the request did not become ready in time; or as many
    requests as may wait for it already."""

    status, type, code = 503, "service_unavailable", "instance_starting"


def no_instance(pool: str, model: str = "") -> NoInstanceError:
    """The error where no instance of a pool takes requests; with ``model``, none of those that serve this name."""
    which = f" that lists the model {model!r}" if model else ""
    message = f"no instance of pool {pool!r}{which} is ready; see /admin/instances"
    return NoInstanceError(message, retry_after_s=NO_INSTANCE_RETRY_S)


def unknown_model(model: str) -> UnknownModelError:
    """The error for a model that does not exist, and for one that the caller may not use: it cannot tell the two
    apart."""
    shown = beginning_of(model)
    return UnknownModelError(f"the model {shown!r} does not exist; GET /v1/models lists those that do", param="model")


def beginning_of(name: str) -> str:
    """A name of a client's, as messages repeat it: however long it is, they are short."""
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}…"


class SloUnreachableError(RouterError):
    """No instance is expected to answer in time, and late requests are refused (``router.late_requests``)."""

    status, type, code = 503, "service_unavailable", "slo_unreachable"


class StoreAwayError(RouterError):
    """The shared state is out of reach, and so the request was not placed."""

    status, type, code = 503, "service_unavailable", "store_unavailable"


class TokenKeysComingError(RouterError):
    """The key that signed the client's token is not known yet, and is being fetched."""

    status, type, code = 503, "service_unavailable", "token_keys_coming"

    def __init__(
        self,
        message: str,
        *,
        fetched: asyncio.Future[None] | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """``fetched``: done once the keys were fetched, for the request to wait for; None: too many wait already."""
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.fetched = fetched


class NoLimitsError(RouterError):
    """The shared state is out of reach, and what is used of the tenant's limits with it."""

    status, type, code = 503, "service_unavailable", "limits_unknown"


class ShuttingDownError(RouterError):
    """This replica stops, and the time for requests in flight to finish is over."""

    status, type, code = 503, "service_unavailable", "shutting_down"


class OutOfFilesError(RouterError):
    """This replica has no file descriptor left for a connection to an instance."""

    status, type, code = 503, "service_unavailable", "out_of_files"


class HoldTimeoutError(RouterError):
    """The request waited for an instance as long as the settings allow."""

    status, type, code = 504, "timeout_error", "hold_timeout"


class UpstreamTimeoutError(RouterError):
    """The instance took too long: no first byte, a gap in the stream, or the whole answer."""

    status, type, code = 504, "timeout_error", "upstream_timeout"


def from_exception(error: BaseException) -> RouterError:
    """The router's error for any exception; unknown ones become a 500 that reveals nothing."""
    if isinstance(error, RouterError):
        return error
    if isinstance(error, LimitsUnknownError):
        return NoLimitsError(
            "the shared state is out of reach, so what is left of your limits is not known, and nothing that draws from"
            " them is admitted until it is back (router.limits_without_store: closed); try again shortly",
            retry_after_s=1.0,
        )
    if isinstance(error, StoreUnavailableError):
        return StoreAwayError("the shared state is out of reach; try again shortly", retry_after_s=1.0)
    if isinstance(error, StoreError):
        return StoreAwayError(f"the shared state refused the call: {error}", retry_after_s=1.0)
    return RouterError("internal error of the router; its log has the details under this request id")


def error_body(error: RouterError, path: str = "") -> dict[str, Any]:
    """The error as clients of the path read it: Anthropic's object for its API, OpenAI's for every other path."""
    if path in _ANTHROPIC_PATHS:
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = (error.counted if isinstance(error, RateLimitError) else "") or error.type
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code},
    }


def error_headers(error: RouterError) -> dict[str, str]:
    """Headers that belong to the answer beside its body: ``retry-after`` (whole seconds), what is left of limits, and
    the 401 challenge."""
    headers = {name.decode(): value.decode() for name, value in error.limit_fields}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(min(LONGEST_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, QuotaSpentError) or (isinstance(error, RateLimitError) and error.retry_after_s is None):
        headers["x-should-retry"] = "false"  # the clients of OpenAI and Anthropic repeat any 429 otherwise
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers
