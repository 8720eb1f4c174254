"""Finding the server: directly, through Sentinel, in a cluster; each a real server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from statestore.embedded import EmbeddedValkey, server_binary
from statestore.errors import StoreConfigurationError, StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis import RedisStore
from statestore.resolve import resolver_of, without_password
from statestore.settings import StoreSettings
from tests.statestore.samples import CHAIN, SCHEDULING, instance, reservation

KEYS = PoolKeys("dualmap", "default")


def free_port() -> int:
    # Below the ephemeral range: a cluster's bus listens 10000 ports higher.
    for port in range(21_000, 31_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@contextlib.contextmanager
def running(folder: Path, *arguments: str, port: int) -> Iterator[redis.Redis]:
    """A bare server process with these arguments, and a client to it."""
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(server_binary()), *arguments, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)],
            stdout=output,
            stderr=output,
        )
    client = redis.Redis(port=port)
    try:
        deadline_s = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.02)
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://example:7000/3", ("example", 7000, None, 3)),
        ("redis://example", ("example", 6379, None, 0)),
        ("rediss://user:p%40ss@example:7000/1", ("example", 7000, "p@ss", 1)),
    ],
)
async def test_a_url_names_host_port_password_and_database(url: str, expected: tuple[object, ...]) -> None:
    endpoint = await resolver_of(url, 1.0).endpoint(KEYS)

    assert (endpoint.host, endpoint.port, endpoint.password, endpoint.db) == expected
    assert (endpoint.tls is not None) == url.startswith("rediss")


async def test_a_unix_socket_is_named_by_its_path() -> None:
    endpoint = await resolver_of("unix:///tmp/store.sock?db=2", 1.0).endpoint(KEYS)

    assert (endpoint.unix_path, endpoint.db) == ("/tmp/store.sock", 2)


def test_a_certificate_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(StoreConfigurationError, match=r"store\.url .*ssl_ca_certs=/nope\.pem cannot be read"):
        resolver_of("rediss://x/0?ssl_ca_certs=/nope.pem", 1.0)


@pytest.mark.parametrize(
    ("change", "what"), [(("/0", "/99"), "database"), (("redis://", "redis://nobody:wrong@"), "user or password")]
)
async def test_what_a_server_refuses_of_the_url_is_a_configuration_error(
    valkey_url: str, change: tuple[str, str], what: str
) -> None:
    port = valkey_url.rpartition(":")[2].partition("/")[0]
    url = f"redis://127.0.0.1:{port}/0".replace(*change)
    store = RedisStore(StoreSettings(url=url), scheduling=SCHEDULING)

    with pytest.raises(StoreConfigurationError, match=rf"refuses the {what} of store\.url"):
        await store.open()
    await store.close()


@pytest.fixture
async def sentinel_store(valkey_server: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[RedisStore]:
    master_port = int(valkey_server.url.rpartition(":")[2].partition("/")[0])
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor fleet 127.0.0.1 {master_port} 1\n")
    with running(tmp_path, str(configuration), "--sentinel", port=port):
        settings = StoreSettings(url=f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/fleet/0", prefix="sentinel-test")
        store = RedisStore(settings, scheduling=SCHEDULING)
        await store.open()
        yield store
        await store.close()


async def test_sentinel_names_the_master_even_if_the_first_sentinel_is_away(sentinel_store: RedisStore) -> None:
    pool = sentinel_store.pool("default")
    await pool.put_instance(instance("a"))

    assert (await pool.reserve(reservation("r", chain=CHAIN))).status == "dispatched"


async def test_a_master_no_sentinel_knows_is_out_of_reach(sentinel_store: RedisStore) -> None:
    url = sentinel_store.settings.url.replace("/fleet/", "/other/")

    with pytest.raises(StoreUnavailableError, match="other"):
        await RedisStore(StoreSettings(url=url), scheduling=SCHEDULING).open()


async def test_every_pool_of_a_cluster_lives_on_the_node_of_its_slot(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in ("left", "right"):
            folder = tmp_path / name
            folder.mkdir()
            port = free_port()
            client = stack.enter_context(
                running(
                    folder, "--cluster-enabled", "yes", "--save", "", "--cluster-port", str(port + 10_000), port=port
                )
            )
            nodes.append((client, port))
        form_cluster(nodes)
        store = RedisStore(StoreSettings(url=f"redis+cluster://127.0.0.1:{nodes[0][1]}"), scheduling=SCHEDULING)
        await store.open()
        names = [f"pool-{number}" for number in range(8)]
        for name in names:
            pool = store.pool(name)
            await pool.put_instance(instance("a"))
            assert (await pool.reserve(reservation("r", chain=CHAIN))).status == "dispatched"
            assert (await pool.observe(["a"], CHAIN)).loads["a"].hit_blocks == 4
            assert len((await pool.snapshot()).requests) == 1
        await store.close()

        spread = [{key.decode().split("}")[0] for key in client.keys("*")} for client, _ in nodes]
        assert all(spread), "both nodes have pools"
        assert not spread[0] & spread[1], "no pool is torn apart"


def form_cluster(nodes: list[tuple[redis.Redis, int]]) -> None:
    """Two nodes, each with half of the slots, that know each other."""
    (left, _), (right, right_port) = nodes
    left.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
    right.execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
    left.execute_command("CLUSTER", "MEET", "127.0.0.1", right_port)
    deadline_s = time.monotonic() + 20
    while any(client.cluster("info").get("cluster_state") != "ok" for client, _ in nodes):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://store:6379/0", "redis://store:6379/0"),
        ("redis://:hunter2@store", "redis://***@store"),
        ("rediss+sentinel://fleet:hunt@er2@one:1,two:2/MASTER", "rediss+sentinel://***@one:1,two:2/MASTER"),
        ("unix://fleet:hunter2@/run/store.sock?db=1", "unix://***@/run/store.sock?db=1"),
        ("memory://", "memory://"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
