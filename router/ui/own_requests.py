"""The requests that this replica placed, as the live page lists them."""

from __future__ import annotations

from itertools import islice
from typing import Any

from router.explain import Explanation
from router.runtime import Runtime
from router.ui.figures import key_counts, request_row

_NEW_REQUESTS = 20
"""Told a second at most: more could not be read."""
_COUNTED_REQUESTS = 512
"""That ended last: what the hottest keys are counted over."""

Keys = dict[str, dict[int, tuple[int, int]]]
"""By pool: hash keys with their length in blocks and their requests."""


class OwnRequests:
    """One reader's place in what the replica remembers."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._last_told: str | None = None

    def news(self) -> list[list[Any]]:
        """Rows of the requests that ended since the last call, and of those under way; the newest last."""
        context = self._runtime.context
        ended: list[Explanation] = []
        for explanation in context.decisions.recent(_NEW_REQUESTS):
            if explanation.request_id == self._last_told:
                break
            ended.append(explanation)
        if ended:
            self._last_told = ended[0].request_id
        told = (live.explain() for live in islice(context.live, _NEW_REQUESTS))
        live = [explanation for explanation in told if explanation is not None]
        return [request_row(each, context.replica_id) for each in (*reversed(ended), *live)]

    def keys(self) -> Keys:
        recent = self._runtime.context.decisions.recent(_COUNTED_REQUESTS)
        return {name: key_counts(recent, name) for name in self._runtime.pools.pools}
