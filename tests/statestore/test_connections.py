"""A connection is made, secured and greeted, or it is said what stands in its way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
import trustme

from dualmap.runtime import certificates
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.redis.connections import Address, connection_pool
from dualmap.statestore.settings import StoreSettings
from tests.statestore.processes import running
from tests.statestore.samples import SCHEDULING
from tests.statestore.tls_front import Authority, tls_front
from tests.support.certificates import mounted
from tests.support.ports import free_port
from tests.support.store_servers import binary_of


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])


@contextlib.asynccontextmanager
async def opened(url: str, connect_timeout_s: float = 60.0) -> AsyncIterator[RedisStore]:
    store = RedisStore(StoreSettings(url=url, connect_timeout_s=connect_timeout_s), scheduling=SCHEDULING)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def complaint_about(url: str, connect_timeout_s: float = 60.0) -> StoreError:
    with pytest.raises(StoreError) as caught:
        async with opened(url, connect_timeout_s):
            pass
    return caught.value


async def test_a_server_with_a_certificate_of_a_private_authority_is_a_store(
    server_url: str, authority: Authority
) -> None:
    async with (
        tls_front(authority.server("127.0.0.1"), port_of(server_url)) as port,
        opened(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.file}") as store,
    ):
        assert await store.pool("default").now_ms() > 0


async def test_an_unknown_authority_and_another_name_are_wrong_configurations(
    server_url: str, authority: Authority
) -> None:
    async with tls_front(authority.server("store.internal"), port_of(server_url)) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        unknown = await complaint_about(url)
        misnamed = await complaint_about(f"{url}?ssl_ca_certs={authority.file}")
        async with opened(f"{url}?ssl_ca_certs={authority.file}&ssl_check_hostname=false") as store:
            assert await store.pool("default").now_ms() > 0
        async with opened(f"{url}?ssl_cert_reqs=none") as store:
            assert await store.pool("default").now_ms() > 0

    for error in (unknown, misnamed):
        assert isinstance(error, StoreConfigurationError)
        assert f"the certificate of 127.0.0.1:{port} is not accepted" in str(error)
    assert "ssl_ca_certs" in str(unknown)
    assert "IP address mismatch" in str(misnamed) and "ssl_check_hostname" in str(misnamed)


async def test_a_server_that_wants_a_certificate_is_shown_one(
    server_url: str, authority: Authority, tmp_path: Path
) -> None:
    own = authority.client_certificate(tmp_path / "fleet.pem")
    context = authority.server("127.0.0.1", wants_certificates=True)
    async with tls_front(context, port_of(server_url)) as port:
        url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={authority.file}"
        async with opened(f"{url}&ssl_certfile={own}") as store:
            assert await store.pool("default").now_ms() > 0

        assert "ssl_certfile" in str(await complaint_about(url))


@contextlib.asynccontextmanager
async def wanting_certificates_of(
    ca: trustme.CA, port: int, server: trustme.LeafCert, own_port: int
) -> AsyncIterator[int]:
    """TLS in front of a store that admits clients of this CA alone."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.configure_cert(context)
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    async with tls_front(context, port, own_port=own_port, cuts_off=True) as front:
        yield front


@pytest.mark.parametrize("renewed", [True, False])
async def test_a_renewed_client_certificate_is_shown_when_the_store_is_connected_to_again(
    renewed: bool, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "CHECK_S", 0.0)
    ca, next_ca = trustme.CA(), trustme.CA()
    server, port, front = ca.issue_cert("127.0.0.1"), port_of(server_url), free_port()
    files = mounted(tmp_path / "tls", ca.issue_cert("fleet"), ca)
    url = (
        f"rediss://127.0.0.1:{front}/0?ssl_ca_certs={files.ca}&ssl_certfile={files.certificate}&ssl_keyfile={files.key}"
    )
    async with contextlib.AsyncExitStack() as stack:
        async with wanting_certificates_of(ca, port, server, front):
            store = await stack.enter_async_context(opened(url))
            pool, granted = store.pool("default"), asyncio.Event()
            pool.on_grant("one", lambda *_: granted.set())
            assert await pool.now_ms() > 0
        if renewed:
            files.renew(next_ca.issue_cert("fleet"), ca)
        async with wanting_certificates_of(next_ca, port, server, front):
            if not renewed:
                with pytest.raises(StoreUnavailableError, match="ssl_certfile"):
                    await pool.now_ms()
                return
            deadline_s = time.monotonic() + 60
            while True:
                with contextlib.suppress(StoreUnavailableError):
                    assert await pool.now_ms() > 0
                    break
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.05)
            assert [each.report().problem for each in store.certificates] == [""]


async def test_a_redis_that_wants_certificates_serves_who_shows_one(tmp_path: Path) -> None:
    ca, binary, plain, secure = trustme.CA(), binary_of("redis-debian"), free_port(), free_port()
    served = mounted(tmp_path / "redis", ca.issue_cert("127.0.0.1"), ca)
    own = mounted(tmp_path / "fleet", ca.issue_cert("fleet"), ca)
    options = (
        f"--tls-port {secure} --tls-auth-clients yes --tls-ca-cert-file {served.ca}"
        f" --tls-cert-file {served.certificate} --tls-key-file {served.key}"
    )
    with running(binary, tmp_path, *options.split(), port=plain):
        url = f"rediss://127.0.0.1:{secure}/0?ssl_ca_certs={own.ca}"
        async with opened(f"{url}&ssl_certfile={own.certificate}&ssl_keyfile={own.key}") as store:
            assert await store.pool("default").now_ms() > 0
        assert isinstance(await complaint_about(url), StoreUnavailableError)


async def test_a_url_without_tls_for_a_server_with_it_is_told_of_rediss(server_url: str, authority: Authority) -> None:
    async with tls_front(authority.server("127.0.0.1"), port_of(server_url)) as port:
        error = await complaint_about(f"redis://127.0.0.1:{port}/0")

    assert isinstance(error, StoreUnavailableError)
    assert "use rediss://" in str(error)


async def test_a_server_that_resets_a_connection_without_tls_may_speak_it() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        at_once = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        writer.close()

    server = await asyncio.start_server(reset, "127.0.0.1", 0)
    error = await complaint_about(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    server.close()

    assert "reset by peer" in str(error) and "use rediss://" in str(error)


async def test_a_url_with_tls_for_a_server_without_it_is_told_of_redis(server_url: str) -> None:
    error = await complaint_about(f"rediss://127.0.0.1:{port_of(server_url)}/0", connect_timeout_s=0.2)

    assert isinstance(error, StoreUnavailableError)
    assert "if it speaks no TLS, use redis://" in str(error)


@pytest.mark.parametrize(
    ("change", "what"), [(("/0", "/99"), "database"), (("redis://", "redis://nobody:wrong@"), "user or password")]
)
async def test_what_a_server_refuses_of_the_url_is_a_configuration_error(
    server_url: str, change: tuple[str, str], what: str
) -> None:
    error = await complaint_about(f"redis://127.0.0.1:{port_of(server_url)}/0".replace(*change))

    assert isinstance(error, StoreConfigurationError)
    assert f"refuses the {what} of store.url" in str(error)


async def test_a_password_that_is_missing_is_a_configuration_error() -> None:
    with EmbeddedValkey() as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", "sesame")
        error = await complaint_about(server.url)

    assert isinstance(error, StoreConfigurationError)
    assert "refuses the user or password of store.url" in str(error)


async def test_a_wrong_password_for_a_unix_socket_is_a_configuration_error(tmp_path: Path) -> None:
    with EmbeddedValkey(unix_socket=tmp_path / "store.sock") as server:
        error = await complaint_about(server.url.replace("unix://", "unix://nobody:wrong@"))

    assert isinstance(error, StoreConfigurationError)
    assert f"{tmp_path}/store.sock refuses the user or password of store.url" in str(error)


async def test_a_user_who_may_not_name_connections_is_served(server_url: str) -> None:
    with redis.Redis.from_url(server_url) as client:
        client.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "+@all", "-client")
        try:
            async with opened(f"redis://plain:secret@127.0.0.1:{port_of(server_url)}") as store:
                assert await store.pool("default").now_ms() > 0
        finally:
            client.execute_command("ACL", "DELUSER", "plain")


async def test_connections_have_a_name_for_people(server_url: str) -> None:
    async with opened(server_url):
        with redis.Redis.from_url(server_url) as client:
            assert "dualmap" in [each["name"] for each in client.client_list()]


async def test_a_server_that_takes_no_more_connections_is_away_and_says_what_to_do(server_url: str) -> None:
    with redis.Redis.from_url(server_url) as client:
        former = client.config_get("maxclients")["maxclients"]
        client.config_set("maxclients", 1)
        error = await complaint_about(server_url)
        client.config_set("maxclients", former)

    assert isinstance(error, StoreUnavailableError)
    assert "raise its maxclients" in str(error)


async def test_a_server_that_accepts_and_says_nothing_is_given_up() -> None:
    async with contextlib.AsyncExitStack() as stack:

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            stack.callback(writer.close)

        silent = await asyncio.start_server(accept, "127.0.0.1", 0)
        pool = connection_pool(("127.0.0.1", silent.sockets[0].getsockname()[1]), {}, 0.1)
        with pytest.raises(StoreUnavailableError, match=r"no answer within 0\.1 s"):
            await pool.make_connection().connect()
        silent.close()


async def test_while_nobody_listens_attempts_fail_at_once_and_then_there_is_another() -> None:
    attempts = 0

    async def count() -> Address:
        nonlocal attempts
        attempts += 1
        return "127.0.0.1", 1

    pool = connection_pool(count, {}, 1.0)
    for _ in range(50):
        said = r"cannot connect to the store at 127\.0\.0\.1:1: nothing listens there; start it, or correct store\.url$"
        with pytest.raises(StoreUnavailableError, match=said):
            await pool.make_connection().connect()
    assert attempts == 1

    async with asyncio.timeout(60):
        while attempts == 1:
            with contextlib.suppress(StoreUnavailableError):
                await pool.make_connection().connect()
            await asyncio.sleep(0.01)


async def test_a_store_that_is_away_is_said_in_one_sentence_without_the_librarys_own(tmp_path: Path) -> None:
    missing = await complaint_about(f"unix://{tmp_path}/store.sock")
    nameless = await complaint_about("redis://no-such-host.invalid:6379")

    assert str(missing).startswith(f"cannot connect to the store at {tmp_path}/store.sock: there is no such socket; ")
    assert "there is no host of this name; start it, or correct store.url" in str(nameless)
