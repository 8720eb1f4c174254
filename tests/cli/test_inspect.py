"""`dualmap inspect` against a real store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dualmap.cli import inspect_tables
from dualmap.cli.main import main
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.ring import DualRing
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey, server_binary
from dualmap.statestore.settings import StoreSettings
from tests.support.placements import changed, placement


@pytest.fixture(scope="module")
def store_url() -> Iterator[str]:
    """A store with two instances, one busy, three requests of which two are held, and a hot prefix."""
    with EmbeddedValkey() as valkey:
        asyncio.run(_populate(valkey.url))
        yield valkey.url


async def _populate(url: str) -> None:
    store = await open_store(StoreSettings(url=url), scheduling=SchedulingSettings())
    pool = store.pool("default")
    for name in ("a", "b"):
        await pool.members.put_instance(InstanceSpec(name, f"http://{name}", dispatch_window_tokens=1))
        await pool.members.set_instance_state(name, InstanceState.READY)
    await pool.heartbeat("replica-1", 60_000, {"requests": "3"})
    for number in range(3):
        hashes = (0xAB00 + number, 0xCD00 + number)
        await pool.place(placement(f"request-{number}", "a", 256, other="b", hashes=hashes))
    lease = await pool.leader_lease.acquire("worker-1", 60_000)
    assert lease is not None
    await pool.publications.publish_tree(HotnessTree({0xAB00: 1}), {0xAB00: 42}, fence=lease.fence)
    await store.close()


Inspect = Callable[..., str]


@pytest.fixture
def inspect(store_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inspect:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> str:
        assert main(["inspect", *words, "--store.url", store_url]) == 0
        return capsys.readouterr().out

    return run


def test_the_overview_names_instances_replicas_and_leader(inspect: Inspect) -> None:
    text = inspect("overview")
    for part in ("http://a", "http://b", "768", "replica-1", "worker-1", "migrations: none"):
        assert part in text


def test_queues_list_who_waits_in_order(inspect: Inspect) -> None:
    text = inspect("queues")
    assert "a: 2 held" in text
    assert text.index("request-1") < text.index("request-2")
    assert "request-0" not in text


def test_live_requests_are_listed_up_to_a_limit(inspect: Inspect) -> None:
    text = inspect("requests", "--limit", "1")
    assert "3 live requests" in text
    assert "request-0" in text
    assert "request-1" not in text


def test_the_legs_of_a_pool_without_roles_are_not_told(inspect: Inspect) -> None:
    assert "role" not in inspect("overview")
    assert "leg" not in inspect("requests")


def test_roles_and_legs_are_told_where_there_are_any(
    store_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asyncio.run(_populate_split(store_url))

    assert main(["inspect", "overview", "--pool", "split", "--store.url", store_url]) == 0
    overview = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert main(["inspect", "requests", "--pool", "split", "--store.url", store_url]) == 0
    title, headings, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]

    assert (overview["p"], overview["d"]) == (["prefill", "ready"], ["decode", "ready"])
    assert title[:3] == ["1", "live", "requests"]
    assert headings[:2] == ["request", "leg"]
    legs = sorted((row[:2], row[3]) for row in rows)
    assert legs == [(["asked", "decode"], "d"), (["asked", "prefill"], "p")]


async def _populate_split(url: str) -> None:
    """A pool with roles, and a request with both its legs."""
    store = await open_store(StoreSettings(url=url), scheduling=SchedulingSettings())
    pool = store.pool("split")
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await pool.members.put_instance(InstanceSpec(name, f"http://{name}", role))
        await pool.members.set_instance_state(name, InstanceState.READY)
    await pool.place(changed(placement("asked", "p", 256), leg=Leg.PREFILL))
    decode = changed(placement(decode_leg_id("asked"), "d", 256), leg=Leg.DECODE, roles=(Role.DECODE,))
    await pool.place(decode)
    await store.close()


def test_hot_prefixes_and_cached_blocks_are_decoded(inspect: Inspect) -> None:
    hot = inspect("hot")
    assert "1 hot prefixes" in hot
    assert "42" in hot
    cached = inspect("kv", "a")
    assert "6 blocks listed" in cached
    assert (cached.count("resident"), cached.count("reserved")) == (2, 4)
    assert f"{0xAB00:016x}" in cached


def test_the_rings_shares_are_listed(inspect: Inspect) -> None:
    assert "2 ready instances" in inspect("ring")


def test_shares_of_a_ring_add_up_to_the_whole() -> None:
    rings = DualRing.of([f"i{number}" for number in range(5)], 64)
    shares = inspect_tables.owned_shares(rings.first)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(0.1 < share < 0.3 for share in shares.values())


def test_a_pool_that_the_store_does_not_know_is_an_error_that_says_where_it_looked(
    store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "overview", "--pool", "other", "--store.url", store_url]) == 2
    assert "knows no pool 'other'" in capsys.readouterr().err


def test_a_store_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "kv", "a", "--store.url", "redis://127.0.0.1:1/0"]) == 1
    assert "the store does not answer" in capsys.readouterr().err


def test_an_instance_that_the_pool_does_not_have_is_an_error_that_names_those_it_has(
    store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "kv", "nope", "--store.url", store_url]) == 2
    assert "the pool has no instance 'nope', but a, b" in capsys.readouterr().err


@pytest.fixture
def sentinel_url(store_url: str, tmp_path: Path) -> Iterator[str]:
    """The settings of the store, found through a Sentinel."""
    master_port = store_url.rpartition(":")[2].partition("/")[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor fleet 127.0.0.1 {master_port} 1\nport {port}\nbind 127.0.0.1\n")
    process = subprocess.Popen(
        [str(server_binary()), str(configuration), "--sentinel"], stdout=subprocess.DEVNULL, cwd=tmp_path
    )
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    yield f"redis+sentinel://127.0.0.1:{port}/fleet/0"
    process.kill()
    process.wait()


def test_keys_are_read_from_the_server_that_a_sentinel_names(
    sentinel_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "kv", "a", "--store.url", sentinel_url]) == 0
    assert "6 blocks listed" in capsys.readouterr().out


def test_a_store_without_a_server_has_no_keys_to_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "hot", "--store.url", "memory://"]) == 2
    assert "needs a redis:// URL, not 'memory://'" in capsys.readouterr().err


def test_an_error_names_the_store_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "hot", "--store.url", "rediss://fleet:hunter2@store:7000?ssl_ca_certs=/nope.pem"]) == 2
    said = capsys.readouterr().err
    assert "store:7000" in said
    assert "hunter2" not in said


def test_every_view_has_its_values_as_json(inspect: Inspect) -> None:
    told = {view: json.loads(inspect(*view.split(), "--json")) for view in (*VIEWS, "kv a")}

    assert told["overview"]["instances"]["a"]["url"] == "http://a"
    assert told["overview"]["leader"]["owner"] == "worker-1"
    assert [request["request_id"] for request in told["queues"][0]["held"]] == ["request-1", "request-2"]
    assert len(told["requests"]) == 3
    assert sum(shares[0] for shares in told["ring"].values()) == pytest.approx(1.0)
    assert told["hot"] == [{"prefix": "000000000000ab00", "blocks": 1, "requests": 42}]
    assert told["kv a"]["listed"] == len(told["kv a"]["newest"]) > 0
    assert told["scaling"]["log"] == []


VIEWS = ("overview", "queues", "ring", "hot", "requests", "scaling", "discovery")
