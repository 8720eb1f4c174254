"""How a request ended, or failed on an instance."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dualmap.scheduling.request.answers import Verdict, judge_status
from dualmap.scheduling.values import value

ENGINE_DEATH: Final = "EngineCore encountered an issue"
"""The answer of vLLM's server after its engine died."""


@value
class Usage:
    """The tokens of a request as its instance counted them; None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the instance found in its cache (``usage.prompt_tokens_details.cached_tokens``)."""
    output_tokens: int | None = None


class Outcome(StrEnum):
    """How a request ended; a label in metrics."""

    COMPLETED = "completed"
    ENDED = "ended"
    """The answer began without an error, and is over. Whether all of it came is not known: a gateway relayed it."""
    CLIENT_ERROR = "client_error"
    """The instance answered 4xx, 501 or 505, or a stream ended in such an error: the client's fault, not its own."""
    CLIENT_GONE = "client_gone"
    UPSTREAM_FAILED = "upstream_failed"
    TIMED_OUT = "timed_out"
    CUT_OFF = "cut_off"
    """This replica stopped before the request was over."""
    REFUSED = "refused"
    """The router, or the gateway that asked it, refused it: no room, no instance, or too late by the settings."""
    INTERNAL_ERROR = "internal_error"


class FailureKind(StrEnum):
    """How an instance failed a request; a label in metrics."""

    CONNECT = "connect"
    CLOSED = "closed"
    """The connection broke before the answer was complete."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """The instance answered with a status that justifies a try elsewhere (``scheduling.request.answers``), or with such
    an error in a stream."""
    NO_ANSWER = "no_answer"
    """The instance answered 2xx with something that is no answer: nothing, or a page."""
    ABORTED = "aborted"
    """The instance ended the answer by ``finish_reason: abort``."""
    TRUNCATED = "truncated"
    """The stream ended before the answer did."""
    DOWN = "down"
    """The fleet took it down, or removed it, while the first byte of the answer was due."""
    PROTOCOL = "protocol"
    """The instance answered something that is not HTTP, or nothing."""
    RECOMPUTED = "recomputed"
    """A decoder gave the request back: its memory ran out, and the prompt is to be prefilled again."""
    TRANSFER = "transfer"
    """The KV of a decode leg did not come in time."""
    PULL = "pull"
    """A part of the prompt was to be pulled from another instance, and did not come in time, or was lost."""
    ADAPTER = "adapter"
    """The instance did not load the adapter of the request; or it had lost it (404), and loads it again."""
    NO_DECODER = "no_decoder"
    """No instance takes the decode leg."""
    DRAINED = "drained"
    """The instance drains, and was not to have the request any longer."""
    EVICTED = "evicted"
    """The request was to leave for one of a higher class."""
    OVERDUE = "overdue"
    """The request took longer than it may, for which its instance is not to blame: the time for the whole of it was
    over, or that for the first byte of an answer that does not stream."""
    MOVED = "moved"
    """The gateway that relays it sent it to another instance, and does not say why."""


FAILED_BY_THE_FLEET: Final = frozenset(
    {Outcome.UPSTREAM_FAILED, Outcome.TIMED_OUT, Outcome.CUT_OFF, Outcome.INTERNAL_ERROR}
)
"""Outcomes of requests that neither their client nor a rule ended, and that were not answered."""

ANSWERED: Final = frozenset({Outcome.COMPLETED, Outcome.ENDED})
"""Outcomes of requests that an instance answered."""


_BLAMELESS: Final = frozenset(
    {
        FailureKind.RECOMPUTED,
        FailureKind.PULL,
        FailureKind.ADAPTER,
        FailureKind.NO_DECODER,
        FailureKind.DRAINED,
        FailureKind.EVICTED,
        FailureKind.OVERDUE,
    }
)
"""Kinds of failures that show nothing about the instance."""

_NEVER_WORKED: Final = frozenset(
    {FailureKind.CONNECT, FailureKind.DRAINED, FailureKind.EVICTED, FailureKind.PULL, FailureKind.ADAPTER}
)
"""Kinds of failures before an instance did any work, and of those that were meant."""


@dataclass(frozen=True, slots=True)
class InstanceFailure:
    kind: FailureKind
    detail: str = ""
    status: int | None = None
    pause_s: float | None = None
    """The time after which it takes requests again, as it says (``retry-after``)."""
    still_accepts: bool = False
    """The port took another connection after this one had broken."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the instance that the failure gives."""
        if self.kind in _BLAMELESS:
            return Verdict.BLAMELESS
        if self.kind in (FailureKind.NO_ANSWER, FailureKind.MOVED):
            return Verdict.DISPUTED
        if self.kind is not FailureKind.STATUS or self.status is None:
            return Verdict.FAULT
        return judge_status(self.status, names_pause=self.pause_s is not None)

    @property
    def reason(self) -> str:
        """The kind, with the status where there is one: a label in metrics."""
        return self.kind.value if self.status is None else f"{self.kind.value}_{self.status}"

    @property
    def engine_died(self) -> bool:
        """True when the instance seems to have died, or stopped working, while it held the request. A port that still
        accepts is no proof: a proxy accepts before it connects."""
        if self.kind is FailureKind.CLOSED:
            return not self.still_accepts
        return self.kind is FailureKind.DOWN or ENGINE_DEATH in self.detail

    @property
    def lost_adapter(self) -> bool:
        """Whether the instance had the adapter of the request no more: it is to load it again."""
        return self.kind is FailureKind.ADAPTER and self.status is not None

    @property
    def lost_kv(self) -> bool:
        """Whether a decode leg failed when its instance had the KV, or found that it is gone."""
        return self.kind is FailureKind.RECOMPUTED or (self.status == 500 and not self.engine_died)

    @property
    def blames_the_request(self) -> bool:
        """Whether the instance says that the client is at fault. Another instance may say otherwise."""
        return self.verdict is Verdict.DISPUTED and self.status is not None and 400 <= self.status < 500

    @property
    def wasted_work(self) -> bool:
        """False when the instance never worked on the request, so that another try repeats nothing; and where it was
        meant to."""
        refused = self.verdict in (Verdict.BUSY, Verdict.DISPUTED)
        return self.kind not in _NEVER_WORKED and not refused

    def __str__(self) -> str:
        status = f" {self.status}" if self.status is not None else ""
        return f"{self.kind}{status}: {self.detail}" if self.detail else f"{self.kind}{status}"
