"""Peers that cannot be reached at the address that they advertise are named."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from dualmap.router.peer_client import PeerClient
from dualmap.router.replica.peer_watch import FAILURES, PeerWatch


class Network(httpx.AsyncBaseTransport):
    """The replica that answers, by host; an exception where none does."""

    def __init__(self) -> None:
        self.replicas: dict[str, Any] = {}
        self.asked: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        found = self.replicas.get(request.url.host, httpx.ConnectError("Name or service not known"))
        if isinstance(found, Exception):
            raise found
        return httpx.Response(200, json={"status": "ok", "replica_id": found})


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def addresses() -> dict[str, str]:
    return {"me": "http://me:1", "near": "http://near:1", "pod": "http://pod-7:1", "silent": ""}


@pytest.fixture
def watch(network: Network, addresses: dict[str, str], clock: Any) -> PeerWatch:
    async def known() -> dict[str, str]:
        return addresses

    return PeerWatch("me", known, clock, PeerClient(network))


async def test_a_peer_whose_name_nobody_can_resolve_is_said_once_with_what_to_set(
    watch: PeerWatch, network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    network.replicas = {"near": "near"}

    seen = []
    for _ in range(FAILURES + 2):
        await watch.look()
        seen.append(sorted(watch.unreachable))

    assert seen == [[], ["pod"], ["pod"], ["pod"]], "one failure alone is a restart"
    assert "Name or service not known" in watch.unreachable["pod"]
    assert caplog.text.count("router.advertise_url") == 1
    assert set(network.asked) == {"near", "pod-7"}


async def test_a_peer_that_is_reached_again_or_has_left_is_not_named_any_more(
    watch: PeerWatch, network: Network, addresses: dict[str, str]
) -> None:
    network.replicas = {"near": ValueError("gone")}
    for _ in range(FAILURES):
        await watch.look()
    assert sorted(watch.unreachable) == ["near", "pod"]

    network.replicas["near"] = "near"
    del addresses["pod"]
    await watch.look()

    assert watch.unreachable == {}


async def test_an_address_at_which_another_replica_answers_leads_not_to_the_peer(
    watch: PeerWatch, network: Network
) -> None:
    network.replicas = {"near": "me", "pod-7": None}

    for _ in range(FAILURES):
        await watch.look()

    assert watch.unreachable == {"near": "me answers there", "pod": "something else answers there"}


async def test_an_address_that_replicas_share_is_not_asked(
    watch: PeerWatch, network: Network, addresses: dict[str, str]
) -> None:
    addresses["pod"] = addresses["near"] = addresses["me"]

    for _ in range(FAILURES):
        await watch.look()

    assert (watch.unreachable, network.asked) == ({}, [])


async def test_health_names_peers_that_cannot_be_reached(start_runtime: Any, client_of: Any, store: Any) -> None:
    runtime = await start_runtime()
    await store.pool("default").heartbeat("far", 60_000, {"ops_url": "http://no-such-host.invalid:1"})

    for _ in range(FAILURES):
        await runtime.peer_watch.look()

    report = (await client_of(runtime).get("/health")).json()
    assert report["status"] == "ok"
    assert "far" in report["unreachable_replicas"]
