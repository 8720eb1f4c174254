"""A kept copy of a list: what is listed again when, and what stays meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.workers.discovery import kubernetes_api
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.discovery.watch import WATCH_GRACE_S, WATCH_S, Watch
from tests.support.kubernetes_cluster import PODS, Cluster, ClusterTransport, Refusal
from tests.support.manual_clock import ManualClock, settle


class Watched:
    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        self.cluster = Cluster(self.clock)
        self.api = KubernetesApi(
            KubernetesSettings(label_selector="app=vllm", api_url="http://cluster", **settings),
            transport=ClusterTransport(self.cluster),
        )
        self.watch = Watch[str](
            self.api,
            PODS,
            {"labelSelector": "app=vllm"},
            _name_of,
            resync_s=3600,
            clock=self.clock,
            jitter=random.Random(5),
        )

    @property
    def names(self) -> set[str]:
        return set((self.watch.objects or {}).values())

    @property
    def lists(self) -> int:
        return sum(not call.is_watch and "continue" not in call.params for call in self.cluster.calls)

    async def advance(self, by_s: float = 0.0) -> None:
        await self.clock.advance(by_s)
        await settle(200)


def _name_of(given: Mapping[str, Any]) -> str:
    return str(given["metadata"]["name"])


@asynccontextmanager
async def watched(*pods: str) -> AsyncIterator[Watched]:
    here = Watched()
    for name in pods:
        here.cluster.put_pod(name)
    task = asyncio.create_task(here.watch.run())
    await here.advance()
    try:
        yield here
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await here.api.close()


async def test_events_are_kept_as_they_come() -> None:
    async with watched("a") as here:
        assert here.names == {"a"}
        here.cluster.put_pod("b")
        here.cluster.put_pod("a", labels={"app": "other"})
        await here.advance()
        assert here.names == {"b"}
        here.cluster.delete(PODS, "b")
        await here.advance()
        assert (here.names, here.lists) == (set(), 1)


async def test_a_long_list_comes_in_pages_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_api, "PAGE_LIMIT", 2)
    async with watched(*"abcde") as here:
        assert here.names == set("abcde")
        assert [call.params.get("continue") for call in here.cluster.calls[:3]] == [None, "105:2", "105:4"]


async def test_a_watch_that_ends_as_agreed_goes_on_from_the_last_version_without_a_list() -> None:
    async with watched("a") as here:
        here.cluster.put_pod("other", labels={})
        here.cluster.bookmark()
        for _ in range(5):
            await here.advance(WATCH_S)
        here.cluster.put_pod("b")
        await here.advance()

        assert (here.names, here.lists) == ({"a", "b"}, 1)
        versions = [call.params["resourceVersion"] for call in here.cluster.calls if call.is_watch]
        assert versions[:2] == ["101", "102"]  # the second of a bookmark alone


@pytest.mark.parametrize("by_status", [True, False])
async def test_an_expired_version_is_listed_again_at_once_and_what_the_list_lacks_is_dropped(by_status: bool) -> None:
    async with watched("a", "b") as here:
        here.cluster.expires_by_status = by_status
        here.cluster.is_silent = True
        here.cluster.delete(PODS, "a")
        here.cluster.put_pod("c")
        here.cluster.compact()
        await here.advance(WATCH_S + WATCH_GRACE_S)
        here.cluster.is_silent = False
        await here.advance(2)

        assert here.names == {"b", "c"}


async def test_a_watch_that_expires_again_and_again_is_not_asked_in_a_loop() -> None:
    async with watched("a") as here:
        expired = b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}}\n'
        here.cluster.refuse = lambda call: Refusal(200, expired) if call.is_watch else None
        here.cluster.cut()
        before = here.lists
        for _ in range(60):
            await here.advance(1)

        assert 3 < here.lists - before < 15
        assert here.names == {"a"} and here.watch.trouble == "410 too old"


async def test_a_silent_watch_ends_after_its_time_and_the_grace() -> None:
    async with watched("a") as here:
        here.cluster.is_silent = True
        here.cluster.put_pod("b")
        await here.advance(WATCH_S + WATCH_GRACE_S - 1)
        assert (here.names, here.lists) == ({"a"}, 1)

        here.cluster.is_silent = False
        await here.advance(1.1)
        assert "its connection is dead" in str(here.watch.trouble)
        await here.advance(1)
        assert (here.names, here.watch.trouble) == ({"a", "b"}, None)


async def test_everything_is_listed_again_in_time_although_nothing_fails() -> None:
    async with watched("a") as here:
        for _ in range(75):
            await here.advance(60)
        assert here.lists == 2


async def test_a_server_that_ends_each_watch_at_once_is_not_flooded() -> None:
    async with watched("a") as here:
        here.cluster.refuse = lambda call: Refusal(200, b"") if call.is_watch else None
        here.cluster.cut()
        await here.advance(2)
        before = len(here.cluster.calls)
        for _ in range(60):
            await here.advance(1)
        assert len(here.cluster.calls) - before <= 80


async def test_pauses_grow_to_a_bound_and_are_as_long_as_the_server_asks() -> None:
    async with watched("a") as here:
        here.cluster.refuse = lambda _: Refusal(500)
        here.cluster.cut()
        here.clock.naps_s.clear()
        for _ in range(40):
            await here.advance(30)
        assert max(here.clock.naps_s) <= 30 * 1.25
        here.cluster.refuse = lambda _: Refusal(429, headers={"retry-after": "77"})
        here.clock.naps_s.clear()
        for _ in range(10):
            await here.advance(30)
        assert 77 in here.clock.naps_s


@pytest.mark.parametrize(
    "line",
    [
        b"{]\n",
        b"7\n",
        b'{"type": "ADDED"}\n',
        b'{"type": "NEWS", "object": {"metadata": {"uid": "u", "name": "a", "resourceVersion": "1"}}}\n',
        b'{"type": "ADDED", "object": {"metadata": {"name": "x", "resourceVersion": "1"}}}\n',
        b'{"type": "BOOKMARK", "object": {"metadata": {}}}\n',
        b'{"type": "ERROR", "object": {"code": 500, "message": "etcd"}}\n',
    ],
)
async def test_an_event_that_cannot_be_read_is_followed_by_a_list(line: bytes) -> None:
    async with watched("a") as here:
        before = here.lists
        here.cluster.refuse = lambda call: Refusal(200, line) if call.is_watch else None
        here.cluster.cut()
        await here.advance(2)
        assert here.names == {"a"} and here.watch.trouble
        here.cluster.refuse = lambda _: None
        here.cluster.put_pod("b")
        await here.advance(30)
        assert (here.names, here.watch.trouble) == ({"a", "b"}, None) and here.lists > before


async def test_an_event_may_contain_what_python_takes_for_the_end_of_a_line() -> None:
    async with watched() as here:
        event = (
            '{"type": "ADDED", "object": {"metadata": {"uid": "u", "name": "a\u2028b\x85", "resourceVersion": "9"}}}'
        )
        here.cluster.refuse = lambda call: Refusal(200, event.encode()) if call.is_watch else None
        here.cluster.cut()
        await here.advance(2)
        assert here.names == set()  # no line feed: the rest of the line never came

        here.cluster.refuse = lambda call: Refusal(200, event.encode() + b"\n") if call.is_watch else None
        await here.advance(2)
        assert here.names == {"a\u2028b\x85"}
