"""The publishers of KV events that instances name: each is asked in the background, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from dualmap.runtime.clock import Clock
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.workers.kv_events.source import EventSource, source_said
from dualmap.workers.probe import NotSentError

UNKNOWN_S: Final = 2.0
"""Pause before an instance is asked again that named no publisher."""
KNOWN_S: Final = 30.0
"""Pause before an instance is asked again that named one: after a start it may publish elsewhere."""


_Place = tuple[str, int | None]


class Asking(Protocol):
    """Asks a server for ``GET /kv_event_sources``."""

    async def kv_event_sources(self, url: str) -> Any: ...


class AskedSources:
    """The last answer of each instance. One that does not answer any more keeps its own."""

    def __init__(self, prober: Asking, clock: Clock) -> None:
        self._prober = prober
        self._clock = clock
        self._known: dict[str, tuple[_Place, EventSource]] = {}
        self._asked_s: dict[str, float] = {}
        self._asking: asyncio.Task[None] | None = None

    def of(self, specs: Sequence[InstanceSpec]) -> Mapping[str, EventSource]:
        """The sources that are known of these instances; those that are due are asked meanwhile."""
        places = {spec.instance_id: _place(spec) for spec in specs}
        self._known = {name: each for name, each in self._known.items() if places.get(name) == each[0]}
        self._asked_s = {name: at_s for name, at_s in self._asked_s.items() if name in places}
        due = [spec for spec in specs if self._is_due(spec)]
        if due and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask(due))
        return {name: source for name, (_, source) in self._known.items()}

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _is_due(self, spec: InstanceSpec) -> bool:
        asked_s = self._asked_s.get(spec.instance_id)
        pause_s = KNOWN_S if spec.instance_id in self._known else UNKNOWN_S
        return asked_s is None or self._clock.monotonic_s() - asked_s >= pause_s

    async def _ask(self, specs: Iterable[InstanceSpec]) -> None:
        await asyncio.gather(*map(self._ask_one, specs))

    async def _ask_one(self, spec: InstanceSpec) -> None:
        self._asked_s[spec.instance_id] = self._clock.monotonic_s()
        try:
            source = source_said(spec, await self._prober.kv_event_sources(spec.url))
        except NotSentError:
            return
        if source is not None:
            self._known[spec.instance_id] = _place(spec), source


def _place(spec: InstanceSpec) -> _Place:
    return spec.url, spec.data_parallel_rank
