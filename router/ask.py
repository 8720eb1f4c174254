"""What a client asks for, and how the answer went: the words between the data plane and the life cycle."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.errors import InvalidRequestError
from scheduling.breaker import is_server_fault
from scheduling.values import value

# Paths whose prompts are scheduled; every other path is passed to any suitable instance of the pool.
SCHEDULED_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})

MAX_SLO_S = 3600.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:@/+=-]{1,128}")


@dataclass(slots=True)
class Ask:
    """One parsed inference request, before it is placed."""

    request_id: str
    model: str
    """As the client sent it: a model name, an alias or a LoRA name; "" when the path names none."""
    path: str
    body: Mapping[str, Any]
    """The parsed JSON body until it is forgotten; empty for requests without one."""
    body_bytes: int
    slo_s: float | None
    """TTFT SLO by header; None for the configured one."""
    stream: bool
    form: bool = False
    """The body is a form, not JSON."""

    def forget_body(self) -> None:
        """What scheduling needs of it was read. It takes more memory than what was sent, and that is sent on."""
        self.body = {}

    @property
    def scheduled(self) -> bool:
        return self.path in SCHEDULED_PATHS


@value
class Usage:
    """The tokens of a request as its instance counted them; None: it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt's, how many it found in its cache (``usage.prompt_tokens_details.cached_tokens``)."""
    output_tokens: int | None = None


class Outcome(StrEnum):
    """How a placed request ended; a label in metrics."""

    COMPLETED = "completed"
    CLIENT_ERROR = "client_error"
    """The instance answered 4xx, 501 or 505, or a stream ended in such an error: the client's fault, not its own."""
    CLIENT_GONE = "client_gone"
    UPSTREAM_FAILED = "upstream_failed"
    TIMED_OUT = "timed_out"
    CUT_OFF = "cut_off"
    """This replica stopped before the request was over."""
    REFUSED = "refused"
    """Never reached an instance: no room, no instance, or held too long."""
    INTERNAL_ERROR = "internal_error"


class FailureKind(StrEnum):
    """How an instance failed a request before its first byte; a label in metrics."""

    CONNECT = "connect"
    CLOSED = "closed"
    """The connection broke before the first byte of the answer."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """It answered with a status that is worth another try elsewhere (408, 429, 5xx but for 501 and 505)."""
    DOWN = "down"
    """The fleet took it down, or removed it, while the first byte of the answer was due."""
    PROTOCOL = "protocol"
    """It answered something that is not HTTP."""


@dataclass(frozen=True, slots=True)
class InstanceFailure:
    kind: FailureKind
    detail: str = ""
    status: int | None = None

    @property
    def server_fault(self) -> bool:
        """True when the instance is to blame: it counts for the circuit breaker. 4xx, 501 and 505 never do."""
        return self.kind is not FailureKind.STATUS or is_server_fault(self.status)

    @property
    def wasted_work(self) -> bool:
        """False when the instance never got the request, so that another try repeats nothing."""
        return self.kind is not FailureKind.CONNECT

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        return f"{self.kind}{status}: {self.detail}" if self.detail else f"{self.kind}{status}"


def mint_request_id() -> str:
    """A request id that no other replica mints."""
    return os.urandom(16).hex()


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
    """The TTFT SLO of ``x-slo-ttft-ms`` in seconds; None when the header is absent.

    Raises:
        InvalidRequestError: not a number of milliseconds above 0 and up to one hour.
    """
    if header is None:
        return None
    try:
        slo_s = float(header) / 1000.0
    except ValueError:
        slo_s = 0.0
    if not 0.0 < slo_s <= MAX_SLO_S:
        raise InvalidRequestError(f"x-slo-ttft-ms must be milliseconds above 0 and up to {MAX_SLO_S * 1000:.0f}")
    return slo_s


def read_count(body: Mapping[str, Any], param: str) -> int | None:
    """The count in a field of the body (``max_tokens``, ``n``); None when it is absent or null.

    Raises:
        InvalidRequestError: not an integer, or below 0.
    """
    count = body.get(param)
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise InvalidRequestError(f"{param} must be an integer, 0 or more", param=param)
    return count
