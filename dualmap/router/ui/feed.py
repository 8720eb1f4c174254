"""The frames of the live page: one reading of the store a second for all viewers of a replica, none without viewers.

A frame is a server-sent event, encoded once. ``hello`` has all that a new viewer needs; a ``tick`` has the figures of
now and what is new. A viewer that falls behind by more than the kept frames is sent ``hello`` again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Container, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from typing import Any

import orjson

from dualmap.router.replica.runtime import Runtime
from dualmap.router.telemetry.metrics import TPOT_BOUNDS_S, WAIT_BOUNDS_S
from dualmap.router.telemetry.pressure import WINDOW_S
from dualmap.router.telemetry.traffic import FleetTraffic, TrafficCounts
from dualmap.router.ui.chronicler import (
    LAST_MINUTES_S,
    RECENT_SAMPLES,
    Chronicler,
    ended,
    recent_events,
    recent_traffic,
)
from dualmap.router.ui.figures import LOAD_FIELDS, REQUEST_FIELDS, KeptRows, merged_keys, pool_figures, topology
from dualmap.router.ui.own_requests import Keys, OwnRequests
from dualmap.router.ui.peers import Peers
from dualmap.router.ui.problems import FleetState, PoolState, Since, as_values, problems, troubles
from dualmap.router.ui.status import Event, RecentEvents, ReplicaStatus, status_of
from dualmap.runtime.extras import package_version
from dualmap.scheduling.scaling.scale_record import ScaleEntry
from dualmap.scheduling.state.hotness import MIN_KEY_BLOCKS
from dualmap.statestore.call_values import DiscoveryStatus, PoolOverview
from dualmap.statestore.errors import StoreError
from dualmap.statestore.pool.chronicle import KEPT_SAMPLES, ChronicleRecord, Happened, PoolSample

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
_MAX_AGE_S = INTERVAL_S / 2
"""Largest age of a reading that another reader of this replica caused: a scrape, or the same tick."""
MAX_VIEWERS = 64
_KEPT_FRAMES = 5
KEPT_REQUESTS = 300
"""Rows that a new viewer gets of the latest requests."""
KEPT_NOTABLE = 200
"""Requests kept beside them that failed, were late or were retried."""
_KEPT_HAPPENINGS = 80
_SCALE_LINES = 8
_NEW_HAPPENINGS = 32
"""Lines read at a tick: more could not be read in a second."""
SAMPLE_FIELDS = ("at_s", "over_s", "arrived", "answered", "on_time", "late", "held", "overdue", "ahead_s")


class Feed:
    """The frames of one replica. ``frames`` is one viewer's stream."""

    def __init__(self, runtime: Runtime, peers: Peers) -> None:
        self._runtime = runtime
        self._peers = peers
        self._chronicler = Chronicler(runtime)
        self._viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._sequence = 0
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_FRAMES)
        self._news = asyncio.Event()
        self._traffic = {name: FleetTraffic() for name in self._runtime.pools.pools}
        self._own = OwnRequests(self._runtime)
        self._records: dict[str, ChronicleRecord] = {}
        """The last step of each pool's chronicle."""
        self._recent: dict[str, list[PoolSample]] = {}
        """The samples of the last minute by pool, the latest first."""
        self._samples: dict[str, deque[list[float]]] = {name: deque(maxlen=KEPT_SAMPLES) for name in self._traffic}
        """The samples by pool, as ``SAMPLE_FIELDS`` says, the oldest first."""
        self._last_happened: dict[str, Happened] = {}
        """The line of it that was reported last."""
        self._scaled_ms: dict[str, int] = {}
        """Time of the scaling log's line that was reported last, by pool."""
        self._scaled: dict[str, ScaleEntry] = {}
        """The newest line of each pool's scaling log."""
        self._discovery: dict[str, DiscoveryStatus] = {}
        """How discovery goes, by pool, where the replica knows that the pool has one."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Epoch and tree version of the topology that was sent last, by pool."""
        self._requests = KeptRows(KEPT_REQUESTS, KEPT_NOTABLE)
        self._happened: deque[list[Any]] = deque(maxlen=_KEPT_HAPPENINGS)
        self._figures: dict[str, Any] = {}
        self._urls: dict[str, str] = {}
        """URLs at which peers stream, as the store had them last: it may be away."""
        self._recent_events = RecentEvents()
        self._history: dict[str, deque[tuple[float, TrafficCounts]]] = {name: deque() for name in self._traffic}
        """Counts of each pool over the recent window."""
        self._since = Since()

    @property
    def viewers(self) -> int:
        return self._viewers

    async def frames(self) -> AsyncIterator[bytes]:
        """Server-sent events, until the replica drains."""
        self._viewers += 1
        try:
            self._start()
            seen = -1  # no frame follows it
            while not self._runtime.context.draining:
                news, unread = self._news, [each for each in self._frames if each[0] > seen]
                if unread and unread[0][0] > seen + 1:  # new here, or fell behind
                    seen = self._sequence
                    yield self._hello()
                elif unread:
                    seen, encoded = unread[0]
                    yield encoded
                else:
                    await news.wait()
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._stop()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._reset()
            self._task = asyncio.create_task(self._run())

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        """Read and publish every second, until cancelled: when the last viewer has left."""
        clock = self._runtime.context.clock
        try:
            while True:
                began_s = clock.monotonic_s()
                try:
                    self._publish("tick", await self._tick())
                except Exception:  # the page must say that figures are missing, not stop
                    log.exception("the live page could not be renewed")
                if self._runtime.context.draining:
                    return
                await clock.sleep(max(0.1, INTERVAL_S - (clock.monotonic_s() - began_s)))
        finally:
            self._peers.stop()
            self._wake()

    def _publish(self, event: str, body: Any) -> None:
        self._sequence += 1
        self._frames.append((self._sequence, frame(event, body)))
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # what a frame says ------------------------------------------------------------------------------------------
    def _hello(self) -> bytes:
        runtime = self._runtime
        return frame(
            "hello",
            {
                "replica_id": runtime.context.replica_id,
                "version": package_version(),
                "has_tenants": bool(runtime.tenants.tenants),
                "has_batches": runtime.context.settings.batches.storage is not None,
                "load_fields": ["id", "state", *LOAD_FIELDS],
                "request_fields": REQUEST_FIELDS,
                "pools": [
                    {
                        "name": name,
                        "model": pool.settings.model,
                        "policy": pool.policy.name,
                        "slo_s": pool.scheduling.slo_ttft_s,
                        "key_tokens": pool.scheduling.block_tokens,
                        "min_key_blocks": MIN_KEY_BLOCKS,
                        "ttft_bounds_s": WAIT_BOUNDS_S,
                        "tpot_bounds_s": TPOT_BOUNDS_S,
                    }
                    for name, pool in runtime.pools.pools.items()
                ],
                "topology": {name: topology(pool.view.view) for name, pool in runtime.pools.pools.items()},
                "requests": self._requests.rows(),
                "happened": list(self._happened),
                "sample_fields": SAMPLE_FIELDS,
                "samples": {name: list(samples) for name, samples in self._samples.items()},
                **self._figures,
            },
        )

    async def _tick(self) -> dict[str, Any]:
        requests, own_keys = self._own.read()
        keys, statuses = [own_keys], {self._runtime.context.replica_id: status_of(self._runtime)}
        for replica_id, heard in self._peers.take(await self._peer_urls()).items():
            requests += heard.rows
            keys.append(heard.keys)
            if heard.status is not None:
                statuses[replica_id] = heard.status
        happened: list[list[Any]] = []
        samples: dict[str, list[list[float]]] = {}
        overviews = {name: await self._overview(name, happened, samples) for name in self._runtime.pools.pools}
        happened.sort(key=itemgetter(0))
        pools = {name: self._pool(name, overview, keys) for name, overview in overviews.items()}
        self._requests.add(requests)
        self._happened.extend(happened)
        wrong = self._wrong(overviews, statuses, pools)
        self._figures = {
            "at_s": round(time.time(), 2),
            "viewers": self._viewers,
            "pools_now": pools,
            "problems": wrong,
            "over": self._over({problem["key"] for problem in wrong}),
        }
        changed = dict(self._changed_topologies())
        return {**self._figures, "requests": requests, "happened": happened, "samples": samples, "topology": changed}

    async def _overview(
        self, name: str, happened: list[list[Any]], samples: dict[str, list[list[float]]]
    ) -> PoolOverview | None:
        """A pool as the store has it, with what is new of its chronicle; None if the store is away."""
        try:
            overview = await self._runtime.fleet.get(name, _MAX_AGE_S)
            happened += await self._scale_steps(name)
            if self._discovers(name):
                publications = self._runtime.pools.pools[name].store.publications
                self._discovery[name] = await publications.discovery()
            await self._chronicler.step(name, least_s=INTERVAL_S)
            samples[name] = await self._new_samples(name)
            happened += await self._new_happenings(name)
        except StoreError:
            return None
        return overview

    async def _new_happenings(self, name: str) -> list[list[Any]]:
        """The lines behind the one that was reported last; at first those of the last minutes."""
        chronicle, last = self._runtime.pools.pools[name].store.chronicle, self._last_happened.get(name)
        lines = await chronicle.happened(_KEPT_HAPPENINGS if last is None else _NEW_HAPPENINGS)
        if lines:
            self._last_happened[name] = lines[0]
        new = list(takewhile(lambda line: line != last, lines))
        since_ms = self._records[name].at_ms - 1000 * LAST_MINUTES_S if last is None else 0
        return [[line.at_ms / 1000, name, line.kind, line.text] for line in reversed(new) if line.at_ms >= since_ms]

    async def _new_samples(self, name: str) -> list[list[float]]:
        """The samples behind the one that was reported last; at first all that there are of the last minutes."""
        chronicle, kept = self._runtime.pools.pools[name].store.chronicle, self._samples[name]
        self._records[name] = await chronicle.last_record()
        found = await chronicle.samples(RECENT_SAMPLES if kept else KEPT_SAMPLES)
        self._recent[name] = [*found[:RECENT_SAMPLES]]
        last_s = kept[-1][0] if kept else 0.0
        new = [_sample_row(each) for each in reversed(found) if each.at_ms / 1000 > last_s]
        kept.extend(new)
        return new

    def _over(self, present: Container[str]) -> list[dict[str, Any]]:
        """Problems that were over in the last minutes."""
        found = {
            each.key: {
                "key": each.key, "severity": each.severity, "what": each.what, "why": each.why,
                "since_s": each.since_ms / 1000, "until_s": (each.until_ms or 0) / 1000,
            }
            for record in self._records.values()
            for each in ended(record.problems, record.at_ms)
            if each.key not in present
        }  # fmt: skip
        return [*found.values()]

    def _pool(self, name: str, overview: PoolOverview | None, keys: Sequence[Keys]) -> dict[str, Any]:
        view, store = self._runtime.pools.pools[name].view.view, self._runtime.replicas[name].store_state
        if overview is None:
            states = {instance_id: spec.state.value for instance_id, spec in view.instances.items()}
            return {"store": store, "states": states}
        traffic = self._traffic[name].read(overview.replicas)
        now_s, history = self._runtime.context.clock.monotonic_s(), self._history[name]
        history.append((now_s, traffic))
        while history[0][0] < now_s - WINDOW_S:
            history.popleft()
        counts = merged_keys(each.get(name, {}) for each in keys)
        return {"store": store, **pool_figures(overview, traffic, counts, view.rings)}

    def _wrong(
        self,
        overviews: Mapping[str, PoolOverview | None],
        statuses: Mapping[str, ReplicaStatus],
        pools: Mapping[str, dict[str, Any]],
    ) -> list[dict[str, Any]]:
        """The problems of the fleet; those of single instances are entered into ``pools`` as well."""
        states = []
        for name, overview in overviews.items():
            pool = self._runtime.pools.pools[name]
            counted, over_s = self._recent_counts(name) if overview is not None else (TrafficCounts(), WINDOW_S)
            slo_s = pool.scheduling.slo_ttft_s
            may_be_empty = pool.waiting_room is not None
            scaled, discovery = self._scaled.get(name), self._discovery.get(name, DiscoveryStatus())
            states.append(
                PoolState(
                    name,
                    pool.view.view,
                    slo_s,
                    overview,
                    recent=counted,
                    scaled=scaled,
                    may_be_empty=may_be_empty,
                    discovery=discovery,
                    recent_s=over_s,
                )
            )
        recent = self._recent_events.read(statuses, self._runtime.context.clock.monotonic_s()) | self._limited()
        fleet = FleetState(self._runtime.context.replica_id, states, statuses, recent)
        found, of_instances = problems(fleet), {state.name: troubles(fleet, state) for state in states}
        alone = [problem for each in of_instances.values() for problem in each.values()]
        first = self._since.of([*found, *alone], time.time())
        for record in self._records.values():  # since when is known, though nobody looked
            first |= {
                each.key: (each.since_ms / 1000, False)
                for each in record.problems
                if each.until_ms is None and each.key in first
            }
        for name, each in of_instances.items():
            pools[name]["troubles"] = dict(zip(each, as_values(list(each.values()), first), strict=True))
        return as_values(found, first)

    def _limited(self) -> Counter[Event]:
        """The limits of tenants that were met lately, by the heartbeats of all replicas."""
        met = Counter[Event]()
        for name, record in self._records.items():
            events = recent_events(name, record, self._recent.get(name, ()))
            met |= Counter({event: count for event, count in events.items() if event[0] == "limited"})
        return met

    def _recent_counts(self, name: str) -> tuple[TrafficCounts, float]:
        """The counts of the last minute, and its seconds: of the chronicle, which was kept before anybody looked."""
        record = self._records.get(name)
        if record is None or not self._recent.get(name):
            history = self._history[name]
            return history[-1][1].since(history[0][1]), max(1.0, history[-1][0] - history[0][0])
        return recent_traffic(record, self._recent[name])

    def _discovers(self, name: str) -> bool:
        pool = self._runtime.pools.pools[name]
        entered = any(spec.origin is not None for spec in pool.view.view.instances.values())
        return pool.settings.discovery is not None or entered

    async def _scale_steps(self, name: str) -> list[list[Any]]:
        """The lines of the autoscaler's log after the line that was reported last, the oldest first."""
        lines = await self._runtime.pools.pools[name].store.publications.scaling_log(_SCALE_LINES)
        if lines:
            self._scaled[name] = lines[0]
        new = [line for line in reversed(lines) if line.at_ms > self._scaled_ms.get(name, 0)]
        if new:
            self._scaled_ms[name] = new[-1].at_ms
        return [[line.at_ms / 1000, name, "scale", f"{line.event}: {line.text}"] for line in new]

    def _changed_topologies(self) -> Iterator[tuple[str, Any]]:
        for name, pool in self._runtime.pools.pools.items():
            view = pool.view.view
            version = view.epoch, view.tree_version
            if self._sent.get(name) != version:
                self._sent[name] = version
                yield name, topology(view)

    async def _peer_urls(self) -> Mapping[str, str]:
        """The URLs at which the other live replicas stream requests; the last known ones while the store is away."""
        urls: dict[str, str] = {}
        for name in self._runtime.pools.pools:
            try:
                overview = await self._runtime.fleet.get(name, _MAX_AGE_S)
            except StoreError:
                return self._urls
            for replica in overview.replicas:
                url = replica.info.get("ops_url", "")
                if url and replica.is_alive(overview.now_ms) and replica.replica_id != self._runtime.context.replica_id:
                    urls[replica.replica_id] = url
        self._urls = urls
        return urls


def _sample_row(sample: PoolSample) -> list[float]:
    counts = (sample.counts.get(name, 0) for name in ("arrived", "answered", "on_time", "late"))
    return [sample.at_ms / 1000, sample.over_s, *counts, sample.held, sample.overdue, sample.ahead_s]


def frame(event: str, body: Any) -> bytes:
    """One server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS))
