"""A kept copy of a list of the Kubernetes API: list, then watch from the list's version, and list again when in doubt.

What was listed last stays while the API server is away, refuses, or sends what cannot be understood: an empty copy
would empty the fleet. It is listed again

- when the version to continue from has expired (410, as a status or in an event ERROR): what the list lacks is dropped
- after every other failure, with growing pauses, or those that the server asks for
- where a watch outlives the time that was agreed for it: its connection may be dead
- every ``RESYNC_S``, in case that an event was lost after all

A watch is asked to end after ``WATCH_S``, and goes on from the last version seen, which bookmarks keep recent.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import httpx

from dualmap.runtime.clock import Clock
from dualmap.scheduling.backoff import backoff_s, worth_logging
from dualmap.workers.discovery.kubernetes_api import ApiError, ExpiredError, KubernetesApi, refusal

log = logging.getLogger(__name__)

WATCH_S = 60.0
"""Time that a watch is requested to last. A dead connection is noticed after it, and the grace."""
WATCH_GRACE_S = 10.0
RESYNC_S = 300.0
LIST_TIMEOUT_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
SHORT_WATCH_S = 1.0
"""A watch that ends sooner is opened again after a pause: a server that ends each at once must not be flooded."""

Kept = TypeVar("Kept")


class Watch(Generic[Kept]):
    """The objects of one list, by uid, as ``read`` makes them."""

    def __init__(
        self,
        api: KubernetesApi,
        path: str,
        selector: Mapping[str, str],
        read: Callable[[Mapping[str, Any]], Kept],
        *,
        resync_s: float = RESYNC_S,
        clock: Clock,
        jitter: random.Random,
    ) -> None:
        """``read`` raises ValueError for what is no such object. ``selector`` are the parameters that select."""
        self._api = api
        self._path = path
        self._selector = dict(selector)
        self._read = read
        self._resync_s = resync_s
        self._clock = clock
        self._jitter = jitter
        self._failures = 0
        self.objects: Mapping[str, Kept] | None = None
        """None until the first list. A new mapping at every change."""
        self.trouble: str | None = None
        """Why what is kept may be out of date; None while it is watched."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self._list_and_watch()
                continue
            except ExpiredError as error:
                if not self._failures:  # nothing is wrong: versions expire
                    log.info("watch expired path=%s: %s", self._path, error)
                    self._failures = 1
                    continue
                failure: Exception = error
            except (ApiError, httpx.HTTPError, OSError, TimeoutError) as error:
                failure = error
            except Exception as error:  # a defect must not end discovery for good
                log.exception("watch failed path=%s", self._path)
                failure = error
            await self._pause_after(failure)

    async def _pause_after(self, error: Exception) -> None:
        self._failures += 1
        self.trouble = str(error) if isinstance(error, ApiError) else f"{type(error).__name__} {error}".strip()
        if worth_logging(self._failures):
            log.warning(
                "cannot watch path=%s failures=%d, what was found last stays: %s",
                self._path,
                self._failures,
                self.trouble,
            )
        pause_s = backoff_s(self._failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        retry_after_s = error.retry_after_s if isinstance(error, ApiError) else 0.0
        await self._clock.sleep(max(pause_s * self._jitter.uniform(0.75, 1.25), retry_after_s))

    def _opened(self) -> None:
        """A watch is open. Failures are forgotten by its first event only: it may be refused by that."""
        if self.trouble is not None:
            log.info("watching again path=%s failures=%d", self._path, self._failures)
        self.trouble = None

    async def _list_and_watch(self) -> None:
        """Watch from a list to the next one that is due. Raises ApiError, httpx.HTTPError, OSError, TimeoutError."""
        async with asyncio.timeout(LIST_TIMEOUT_S):
            listed, version = await self._list()
        self.objects = listed
        relist_s = self._clock.monotonic_s() + self._resync_s * self._jitter.uniform(0.9, 1.1)
        while (now_s := self._clock.monotonic_s()) < relist_s:
            version = await self._watch(version, min(WATCH_S, max(1.0, relist_s - now_s)))
            if self._clock.monotonic_s() - now_s < SHORT_WATCH_S:
                await self._clock.sleep(SHORT_WATCH_S * self._jitter.uniform(0.75, 1.25))

    async def _list(self) -> tuple[dict[str, Kept], str]:
        """Everything, and the version that a watch goes on from."""
        kept: dict[str, Kept] = {}
        page: Mapping[str, Any] = {}
        async for page in self._api.pages(self._path, self._selector):
            for item in page.get("items") or ():
                uid, read = self._kept_from(item)
                kept[uid] = read
        return kept, _version_of(page)

    async def _watch(self, version: str, lasts_s: float) -> str:
        """One watch; the version to go on from. Raises as ``_list_and_watch``."""
        params: dict[str, str | int] = {
            **self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": max(1, round(lasts_s)),
        }
        reading = asyncio.ensure_future(self._read_events(version, params))
        bound = asyncio.ensure_future(self._clock.sleep(lasts_s + WATCH_GRACE_S))
        try:
            await asyncio.wait({reading, bound}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                bound_s = lasts_s + WATCH_GRACE_S
                raise ApiError(f"the watch did not end within {bound_s:.0f} s, as agreed: its connection is dead")
            return reading.result()
        finally:
            bound.cancel()
            reading.cancel()
            await asyncio.gather(reading, bound, return_exceptions=True)

    async def _read_events(self, version: str, params: Mapping[str, str | int]) -> str:
        async with self._api.watch(self._path, params) as events:
            self._opened()
            async for event in events:
                version = self._apply(event)
                self._failures = 0
        self._failures = 0
        return version

    def _apply(self, event: Mapping[str, Any]) -> str:
        """Keep what an event says; the version it brings. Raises ApiError."""
        kind, given = event.get("type"), event.get("object")
        if not isinstance(given, dict):
            raise ApiError(f"an event {kind!r} without an object")
        if kind == "ERROR":
            code = given.get("code")
            raise refusal(code if isinstance(code, int) else 500, str(given.get("message") or given.get("reason")))
        if kind == "BOOKMARK":
            return _version_of(given)
        uid, read = self._kept_from(given)
        objects = dict(self.objects or {})
        if kind == "DELETED":
            objects.pop(uid, None)
        elif kind in ("ADDED", "MODIFIED"):
            objects[uid] = read
        else:
            raise ApiError(f"an event of unknown type {kind!r}")
        self.objects = objects
        return _version_of(given)

    def _kept_from(self, given: Any) -> tuple[str, Kept]:
        """Raises ApiError."""
        try:
            metadata = given["metadata"]
            uid = metadata["uid"]
            if not isinstance(uid, str) or not uid:
                raise ValueError("metadata.uid is missing")
            return uid, self._read(given)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(f"the API server sent an object that cannot be read: {error!r}") from error


def _version_of(given: Mapping[str, Any]) -> str:
    metadata = given.get("metadata")
    version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
    if not isinstance(version, str) or not version:
        raise ApiError("the API server sent no resourceVersion")
    return version
