"""Resources that all requests of a replica share, passed in once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from dualmap.router.errors import ReplicaFullError
from dualmap.router.requests.deadlines import Deadlines
from dualmap.router.requests.explain import DecisionLog, Explanation
from dualmap.router.requests.metaserver import Metaserver
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.metrics import RouterMetrics
from dualmap.router.telemetry.recording import TrafficRecorder
from dualmap.router.telemetry.trace_context import TraceContext
from dualmap.router.tenants.limit_hits import LimitHits
from dualmap.router.tenants.rate_limits import LimitReports
from dualmap.router.timers import CallLater
from dualmap.runtime.clock import Clock

if TYPE_CHECKING:
    from dualmap.router.requests.live_request import LiveRequest


_OWN_PART: Final = 16
"""A tenant may have one of so many parts of a replica's room, whatever others have."""


class LiveRequests:
    """The requests of this replica that are held or in flight, by id, up to a limit.

    A tenant may have one of ``_OWN_PART`` parts of the limit, and beyond that no more than it leaves free. So it fills
    half of the room, a second one half of the rest, and some is left for everybody else.

    An id is free again once the store knows that its request is over. Until then a reservation would be taken for a
    repetition of the former one, and a repeated release would end the new request.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.accepted = 0
        """Requests that were ever admitted."""
        self._by_id: dict[str, LiveRequest] = {}
        self._of_tenants = Counter[str]()
        self._releasing: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._by_id.values()))

    def get(self, request_id: str) -> LiveRequest | None:
        return self._by_id.get(request_id)

    def is_free(self, request_id: str) -> bool:
        """Whether a new request may take the id."""
        return request_id not in self._by_id and request_id not in self._releasing

    def enter(self, live: LiveRequest) -> None:
        """Enter a request whose id is not live here.

        Raises:
            ReplicaFullError: the replica has as many as it may, or as many of its tenant.
        """
        free = self._limit - len(self._by_id) - 1
        if free < 0:
            raise ReplicaFullError(
                f"this replica has reached its limit of {self._limit} requests; try again, or raise"
                " router.max_requests",
                retry_after_s=1.0,
            )
        if tenant := live.inference_request.tenant:
            count = self._of_tenants[tenant] + 1
            if count > max(1, self._limit // _OWN_PART, free):
                raise ReplicaFullError(
                    f"your tenant has {count - 1} requests on this replica, its part of router.max_requests that is"
                    " left; try again when some have ended",
                    retry_after_s=1.0,
                )
            self._of_tenants[tenant] = count
        self._by_id[live.request_id] = live
        self.accepted += 1

    def rename(self, live: LiveRequest, request_id: str) -> None:
        """Know the request by another id, which its machine is given next."""
        if self._by_id.get(live.request_id) is live:
            del self._by_id[live.request_id]
        self._by_id[request_id] = live

    def leave(self, live: LiveRequest) -> None:
        if self._by_id.get(live.request_id) is not live:
            return
        del self._by_id[live.request_id]
        if tenant := live.inference_request.tenant:
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def is_releasing(self, request_id: str) -> bool:
        """Whether its end is being sent to the store."""
        return request_id in self._releasing

    def releasing(self, request_id: str) -> Callable[[], None]:
        """The end of a request is about to be sent to the store; the caller must call what is returned once it was."""
        self._releasing.add(request_id)
        return partial(self._releasing.discard, request_id)


@dataclass(kw_only=True, slots=True)
class ReplicaContext:
    replica_id: str
    settings: RouterSettings
    clock: Clock
    call_later: CallLater
    metrics: RouterMetrics
    decisions: DecisionLog
    live: LiveRequests
    deadlines: Deadlines
    limit_hits: LimitHits = field(default_factory=LimitHits)
    limit_reports: LimitReports = field(default_factory=LimitReports)
    recorder: TrafficRecorder | None = field(default=None)
    ended: Callable[[Explanation, TraceContext | None], None] | None = field(default=None)
    """Callback for every request that ended, while it has users: the request log, tracing."""
    metaserver: Metaserver = field(default_factory=Metaserver)
    draining: bool = field(default=False)
    """Set once the replica is to stop: /ready is off, requests are still served until the port closes."""
