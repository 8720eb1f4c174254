"""A batch: a file of requests that are answered when there is room, and the states that it passes through.

The states are those of OpenAI's Batch API. A batch is cut into *ranges* of lines. Replicas claim ranges,
run their lines and report each range once, as a whole.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed, or expired when its window was over
         │             │
         ▼             └─▶ cancelling ─▶ cancelled
       failed

A batch that is cancelled, or whose window is over, keeps what was answered until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

RANGE_LINES: Final = 16
"""Lines of a range: what a replica that dies has answered in vain, at most."""


class Status(StrEnum):
    """The status of a batch, as clients see it."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED: Final = frozenset({Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED})
"""Statuses that a batch keeps."""
_NEXT: Final[Mapping[Status, frozenset[Status]]] = {
    Status.VALIDATING: frozenset({Status.IN_PROGRESS, Status.FAILED, Status.CANCELLED}),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
}


class BatchTransitionError(Exception):
    """A batch cannot get from its status to another one."""


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line of an input file cannot be run."""

    code: str
    message: str
    line: int | None = None
    """Counted from 1; None: it is about the file."""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch. Times are seconds since 1970."""

    batch_id: str
    tenant: str
    """The tenant whose batch it is; empty: no tenant."""
    key: str
    """The name of the key by which it was made."""
    key_digest: str = ""
    """The digest of that key; empty: it was no key that can be revoked."""
    priority_class: str = ""
    """The class that the token or the gateway of its maker names; empty: the tenant's own."""
    endpoint: str
    """The path of all of its requests."""
    input_file: str
    completion_window: str
    created_s: int
    expires_s: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    status: Status = Status.VALIDATING
    entered_s: Mapping[Status, int] = field(default_factory=dict)
    """When it entered each status after the first."""
    lines: int = 0
    """Requests in all; 0 until they are counted."""
    models: tuple[str, ...] = ()
    """The models that its requests name, as they were first named."""
    errors: tuple[LineError, ...] = ()
    output_file: str = ""
    """The file of answers; empty: there is none."""
    error_file: str = ""
    """The file of requests that failed; empty: there is none."""
    completed: int = 0
    failed: int = 0
    """Requests that were answered, and those that were not, once it is over."""

    @property
    def ranges(self) -> int:
        return -(-self.lines // RANGE_LINES)

    @property
    def is_over(self) -> bool:
        return self.status in ENDED

    def entered(self, status: Status, now_s: int) -> Batch:
        """The batch once it has entered a status.

        Raises:
            BatchTransitionError: it cannot from where it is.
        """
        if status not in _NEXT.get(self.status, ()):
            raise BatchTransitionError(f"batch {self.batch_id} is {self.status}, and cannot become {status}")
        return replace(self, status=status, entered_s={**self.entered_s, status: now_s})

    def cancelled(self, now_s: int) -> Batch:
        """The batch once its client has cancelled it. Of one that was not planned yet nothing runs.

        Raises:
            BatchTransitionError: it is ending, or over.
        """
        is_unplanned = self.status is Status.VALIDATING
        return self.entered(Status.CANCELLED if is_unplanned else Status.CANCELLING, now_s)

    def lines_of(self, number: int) -> range:
        """The lines of a range, by their place in the plan."""
        return range(number * RANGE_LINES, min(self.lines, (number + 1) * RANGE_LINES))


@dataclass(frozen=True, slots=True)
class RangeDone:
    """A range whose lines were all run."""

    part: str
    """The name of what was written of it."""
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The ranges of a batch that are done, by number."""

    done: Mapping[int, RangeDone] = field(default_factory=dict)

    @property
    def completed(self) -> int:
        return sum(each.completed for each in self.done.values())

    @property
    def failed(self) -> int:
        return sum(each.failed for each in self.done.values())

    def is_whole(self, batch: Batch) -> bool:
        return len(self.done) >= batch.ranges
