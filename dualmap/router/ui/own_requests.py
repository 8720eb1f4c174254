"""The requests that this replica placed, as the live page lists them."""

from __future__ import annotations

from itertools import islice
from typing import Any, Final

from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.explain import Explanation
from dualmap.router.ui.figures import is_notable, key_counts, request_row

NEW_REQUESTS: Final = 20
"""Most requests reported a second, and as many more that failed, were late or were retried: more could not be read."""
FIRST_REQUESTS: Final = 200
"""Most requests of each kind that are reported to a reader that has just come."""
_COUNTED_REQUESTS: Final = 512
"""Requests that ended last: those that are looked at, and what the hottest keys are counted over."""

Keys = dict[str, dict[int, tuple[int, int]]]
"""Hash keys by pool, with their length in blocks and their requests."""


class OwnRequests:
    """One reader's place in what the replica remembers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last_reported: str | None = None
        self._limit = FIRST_REQUESTS

    def read(self) -> tuple[list[list[Any]], Keys]:
        """Rows of the requests that ended since the last call, and of those under way, the newest last; and the keys
        of the latest requests."""
        context = self._runtime.context
        recent = context.decisions.recent(_COUNTED_REQUESTS)
        limit, self._limit = self._limit, NEW_REQUESTS
        ended: list[Explanation] = []
        plain = notable = 0
        for explanation in recent:
            if explanation.origin.request_id == self._last_reported:
                break
            if is_notable(explanation):
                notable += 1
                chosen = notable <= limit
            else:
                plain += 1
                chosen = plain <= limit
            if chosen:
                ended.append(explanation)
        if recent:
            self._last_reported = recent[0].origin.request_id
        explained = (live.explain() for live in islice(context.live, NEW_REQUESTS))
        live = [explanation for explanation in explained if explanation is not None]
        rows = [request_row(each, context.replica_id) for each in (*reversed(ended), *live)]
        return rows, {name: key_counts(recent, name) for name in self._runtime.pools.pools}
