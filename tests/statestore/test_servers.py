"""Finding the server: directly, through Sentinel, in a cluster; each a real server."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import hiredis
import pytest
import trustme
from redis.crc import key_slot

from dualmap.runtime import certificates
from dualmap.statestore.errors import StoreConfigurationError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.redis.connections import Address
from dualmap.statestore.redis.servers import Servers, tls_context
from dualmap.statestore.settings import StoreSettings
from tests.statestore.processes import form_cluster, node_port, running, until_ok
from tests.statestore.samples import CHAIN, SCHEDULING, instance, place
from tests.statestore.tls_front import Authority, tls_front
from tests.support.certificates import mounted
from tests.support.ports import free_port

KEYS = PoolKeys("dualmap", "default")


async def address(url: str) -> Address:
    """Where the server of the pool is found."""
    return await address_from(Servers(url, 5.0))


async def address_from(servers: Servers) -> Address:
    place = servers.place(KEYS)
    assert not isinstance(place, str)
    return await place() if callable(place) else place


@pytest.mark.parametrize(
    ("url", "expected", "login"),
    [
        ("redis://example:7000/3", ("example", 7000), (None, None, 3)),
        ("redis://example", ("example", 6379), (None, None, 0)),
        ("rediss://user:p%40ss@example:7000/1", ("example", 7000), ("user", "p@ss", 1)),
    ],
)
async def test_a_url_names_host_port_user_password_and_database(url: str, expected: Address, login: object) -> None:
    arguments = Servers(url, 1.0).connections(KEYS).connection_kwargs

    assert await address(url) == expected
    assert (arguments["username"], arguments["password"], arguments["db"]) == login
    assert ("tls" in arguments) == url.startswith("rediss")


async def test_a_unix_socket_is_named_by_its_path() -> None:
    arguments = Servers("unix:///tmp/store.sock?db=2", 1.0).connections(KEYS).connection_kwargs

    assert (arguments["path"], arguments["db"]) == ("/tmp/store.sock", 2)


def test_a_url_without_a_server_is_a_wrong_configuration() -> None:
    with pytest.raises(StoreConfigurationError, match="names no server"):
        Servers("memory://", 1.0)


@pytest.fixture
async def sentinel_store(server_url: str, binary: Path, tmp_path: Path) -> AsyncIterator[RedisStore]:
    master_port = urlsplit(server_url).port
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(f"sentinel monitor fleet 127.0.0.1 {master_port} 1\n")
    with running(binary, tmp_path, str(configuration), "--sentinel", port=port):
        settings = StoreSettings(url=f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/fleet/0")
        store = RedisStore(settings, scheduling=SCHEDULING)
        await store.open()
        yield store
        await store.close()


async def test_sentinel_names_the_master_even_if_the_first_sentinel_is_away(sentinel_store: RedisStore) -> None:
    pool = sentinel_store.pool("default")
    await pool.members.put_instance(instance("a"))

    assert (await place(pool, "r", chain=CHAIN)).status == "dispatched"


async def test_a_master_no_sentinel_knows_is_a_wrong_configuration(sentinel_store: RedisStore) -> None:
    url = sentinel_store.settings.url.replace("/fleet/", "/other/")

    with pytest.raises(StoreConfigurationError, match="No such master"):
        await RedisStore(StoreSettings(url=url), scheduling=SCHEDULING).open()


async def test_sentinels_are_asked_with_their_own_user_and_password(tmp_path: Path, binary: Path) -> None:
    port = free_port()
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        "sentinel monitor fleet 127.0.0.1 7777 1\nrequirepass guard\nuser fleet on >its-own +@all\n"
    )
    with running(binary, tmp_path, str(configuration), "--sentinel", port=port):
        url = f"redis+sentinel://:data@127.0.0.1:{port}/fleet"
        for options in ("?sentinel_password=guard", "?sentinel_username=fleet&sentinel_password=its-own"):
            assert await address(url + options) == ("127.0.0.1", 7777)

        for options in ("", "?sentinel_password=wrong"):
            with pytest.raises(StoreConfigurationError, match="refuses the sentinel_username or sentinel_password"):
                await address(url + options)


async def test_the_sentinel_that_knows_of_the_latest_failover_is_believed() -> None:
    async with scripted(sentinel_of(7001, failovers=3)) as old, scripted(sentinel_of(7002, failovers=4)) as new:
        for order in ((old, new), (new, old)):
            hosts = ",".join(f"127.0.0.1:{port}" for port in order)
            assert await address(f"redis+sentinel://{hosts}/fleet") == ("127.0.0.1", 7002)


@pytest.mark.parametrize("with_tls", [True, False])
async def test_sentinels_speak_tls_with_the_servers_or_as_they_are_told(tmp_path: Path, with_tls: bool) -> None:
    authority = Authority(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(scripted(sentinel_of(7001)))
        if with_tls:
            port = await stack.enter_async_context(tls_front(authority.server("127.0.0.1"), port))
        url = f"rediss+sentinel://127.0.0.1:{port}/fleet?ssl_ca_certs={authority.file}"

        servers = Servers(url if with_tls else f"{url}&sentinel_ssl=false", 5.0)
        assert await address_from(servers) == ("127.0.0.1", 7001)

    assert "tls" in servers.connections(KEYS).connection_kwargs


@pytest.mark.parametrize("scheme", ["rediss+sentinel", "rediss+cluster"])
async def test_whoever_names_the_server_is_shown_the_renewed_certificate(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "CHECK_S", 0.0)
    ca, next_ca = trustme.CA(), trustme.CA()
    files = mounted(tmp_path / "tls", ca.issue_cert("fleet"), ca)
    wants = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(wants)
    next_ca.configure_trust(wants)
    wants.verify_mode = ssl.CERT_REQUIRED
    naming = sentinel_of(7001) if scheme == "rediss+sentinel" else node_naming(7001)
    async with scripted(naming) as behind, tls_front(wants, behind) as port:
        master = "/fleet" if scheme == "rediss+sentinel" else ""
        options = f"ssl_ca_certs={files.ca}&ssl_certfile={files.certificate}&ssl_keyfile={files.key}"
        servers = Servers(f"{scheme}://127.0.0.1:{port}{master}?{options}", 5.0)
        with pytest.raises(StoreUnavailableError):
            await address_from(servers)
        files.renew(next_ca.issue_cert("fleet"), ca)
        assert await address_from(servers) == ("127.0.0.1", 7001)


async def test_the_owner_of_a_slot_is_who_most_nodes_name() -> None:
    async with contextlib.AsyncExitStack() as stack:
        ports = [await stack.enter_async_context(scripted(node_naming(owner))) for owner in (7001, 7002, 7002)]
        hosts = ",".join(f"127.0.0.1:{port}" for port in (1, *ports))

        assert await address(f"redis+cluster://{hosts}") == ("127.0.0.1", 7002)


async def test_a_node_that_does_not_know_its_address_is_where_it_was_asked() -> None:
    async with scripted(node_naming(7001, host="")) as port:
        assert await address(f"redis+cluster://127.0.0.1:{port}") == ("127.0.0.1", 7001)


async def test_when_the_named_nodes_are_gone_those_that_they_named_are_asked() -> None:
    async with scripted(node_naming(7001)) as other:
        async with scripted(node_naming(other)) as named:
            servers = Servers(f"redis+cluster://127.0.0.1:{named}", 5.0)
            assert await address_from(servers) == ("127.0.0.1", other)

        assert await address_from(servers) == ("127.0.0.1", 7001)


async def test_a_slot_without_an_owner_is_out_of_reach() -> None:
    async with scripted(node_naming(7001, last=100)) as port:
        with pytest.raises(StoreUnavailableError, match=r"owns the slot of 'dualmap:\{default\}:meta'"):
            await address(f"redis+cluster://127.0.0.1:{port}")


async def test_a_server_that_is_in_no_cluster_is_a_wrong_configuration(server_url: str) -> None:
    with pytest.raises(StoreConfigurationError, match="cluster support disabled"):
        await address(server_url.replace("redis:", "redis+cluster:"))


async def test_the_nodes_of_a_cluster_are_verified_by_a_private_authority(tmp_path: Path, binary: Path) -> None:
    authority, port, front = Authority(tmp_path), node_port(), free_port()
    options = ("--cluster-enabled", "yes", "--cluster-announce-port", str(front))
    with running(binary, tmp_path, *options, port=port) as client:
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16_384))
        await until_ok([client])
        async with tls_front(authority.server("127.0.0.1"), port, own_port=front):
            url = f"rediss+cluster://127.0.0.1:{front}"
            with pytest.raises(StoreConfigurationError, match="is not accepted"):
                await RedisStore(StoreSettings(url=url), scheduling=SCHEDULING).open()
            store = RedisStore(StoreSettings(url=f"{url}?ssl_ca_certs={authority.file}"), scheduling=SCHEDULING)
            await store.open()
            pool = store.pool("default")
            await pool.members.put_instance(instance("a"))
            assert (await place(pool, "r", chain=CHAIN)).status == "dispatched"
            await store.close()


def test_the_slot_of_a_key_is_that_of_its_pool() -> None:
    for pool in ("default", "chat", "x.y-z_0"):
        keys = PoolKeys("dualmap", pool)
        assert key_slot(keys.meta) == key_slot(keys.kv("a"))


async def test_every_pool_of_a_cluster_lives_on_the_node_of_its_slot(tmp_path: Path, binary: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = []
        for name in ("left", "right"):
            folder = tmp_path / name
            folder.mkdir()
            port = node_port()
            client = stack.enter_context(running(binary, folder, "--cluster-enabled", "yes", "--save", "", port=port))
            nodes.append((client, port))
        await form_cluster(nodes)
        store = RedisStore(StoreSettings(url=f"redis+cluster://127.0.0.1:{nodes[0][1]}"), scheduling=SCHEDULING)
        await store.open()
        names = [f"pool-{number}" for number in range(8)]
        for name in names:
            pool = store.pool(name)
            await pool.members.put_instance(instance("a"))
            assert (await place(pool, "r", chain=CHAIN)).status == "dispatched"
            assert (await pool.observe(["a"], CHAIN)).loads["a"].hit_blocks == 4
            assert len((await pool.snapshot()).requests) == 1
        await store.close()

        spread = [{key.decode().split("}")[0] for key in client.keys("*")} for client, _ in nodes]
        assert all(spread), "both nodes have pools"
        assert not spread[0] & spread[1], "no pool is torn apart"


@contextlib.asynccontextmanager
async def scripted(answer: Callable[[list[bytes]], bytes]) -> AsyncIterator[int]:
    """The port of a server that answers every command as told, and greetings with OK."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        parser = hiredis.Reader()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    writer.write(b"+OK\r\n" if command[0] == b"CLIENT" else answer(command))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*filter(None, serving))  # the callers have hung up


def sentinel_of(master_port: int, *, failovers: int = 0) -> Callable[[list[bytes]], bytes]:
    fields = ("name", "fleet", "ip", "127.0.0.1", "port", str(master_port), "config-epoch", str(failovers))
    return lambda command: hiredis.pack_command(fields)


def node_naming(owner_port: int, *, host: str = "127.0.0.1", last: int = 16383) -> Callable[[list[bytes]], bytes]:
    """A node for which this one owns the slots up to ``last``."""
    owner = b"*2\r\n" + b"$%d\r\n%b\r\n" % (len(host), host.encode()) + b":%d\r\n" % owner_port
    return lambda command: b"*1\r\n*3\r\n:0\r\n:%d\r\n" % last + owner


@pytest.mark.parametrize(
    ("options", "checks_name", "verifies"),
    [
        ({}, True, ssl.CERT_REQUIRED),
        ({"ssl_cert_reqs": "required"}, True, ssl.CERT_REQUIRED),
        ({"ssl_check_hostname": "false"}, False, ssl.CERT_REQUIRED),
        ({"ssl_cert_reqs": "none"}, False, ssl.CERT_NONE),
    ],
)
def test_certificate_and_name_are_verified_unless_told_otherwise(
    options: Mapping[str, str], checks_name: bool, verifies: ssl.VerifyMode
) -> None:
    context = tls_context(options)

    assert (context.check_hostname, context.verify_mode) == (checks_name, verifies)


def test_a_private_authority_takes_the_place_of_the_systems(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    context = tls_context({"ssl_ca_certs": str(tmp_path / "ca.pem")})

    assert len(context.get_ca_certs()) == 1


def test_a_certificate_without_its_key_is_refused_with_both_names(tmp_path: Path) -> None:
    authority = trustme.CA()
    for name in ("one", "other"):
        issued = authority.issue_cert(name)
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")

    tls_context({"ssl_certfile": f"{tmp_path}/one.pem", "ssl_keyfile": f"{tmp_path}/one.key"})
    with pytest.raises(
        ValueError, match=r"ssl_certfile .*/one\.pem with ssl_keyfile .*/other\.key: this is not the key"
    ):
        tls_context({"ssl_certfile": f"{tmp_path}/one.pem", "ssl_keyfile": f"{tmp_path}/other.key"})


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
def test_a_certificate_file_that_cannot_be_read_is_named(scheme: str) -> None:
    with pytest.raises(StoreConfigurationError, match=r"store\.url .*ssl_ca_certs /nope\.pem cannot be read"):
        Servers(f"{scheme}://x/0?ssl_ca_certs=/nope.pem", 1.0)
