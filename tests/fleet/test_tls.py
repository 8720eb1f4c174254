"""Instances that speak TLS, with a certificate of a private CA, and want to see one of their clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.fleet.fleet_process import Fleet, emulated, running_fleet, until
from tests.support.certificates import client_tls, mounted

QUICK = ("--replicas", "1", "--workers", "1", "--instances", "1", "--worker.health_interval_s", "0.3")
TOKENIZES = ("--pools", json.dumps([{"tokenizer": "instances"}]))


@contextlib.contextmanager
def behind_tls(url: str, tls: ssl.SSLContext) -> Iterator[str]:
    """The URL of a server that speaks TLS and passes all bytes on to the one at ``url``."""
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]] = Future()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        with contextlib.suppress(asyncio.CancelledError), contextlib.closing(back), contextlib.closing(writer):
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async def serve() -> None:
        server, stop = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls), asyncio.Event()
        begun.set_result((asyncio.get_running_loop(), stop, server.sockets[0].getsockname()[1]))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, stop, port = begun.result(10)
    try:
        yield f"https://localhost:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def ask(fleet: Fleet, *, stream: bool) -> tuple[str, bytes]:
    """The instance that completes a prompt, and its answer."""
    body = {"model": fleet.model, "prompt": "Hello!", "max_tokens": 4, "stream": stream}
    request = urllib.request.Request(
        f"{fleet.endpoint}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.headers["x-dualmap-instance"]), answer.read()


@pytest.mark.parametrize("named_by", ["environment", "settings"])
def test_every_client_of_an_instance_trusts_it_and_shows_its_certificate(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, ca_file, client_file = trustme.CA(), tmp_path / "ca.pem", tmp_path / "client.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    ca.issue_cert("router.fleet").private_key_and_cert_chain_pem.write_to_path(str(client_file))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(tls)
    options: tuple[str, ...] = ()
    if named_by == "environment":
        monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    else:
        tls.verify_mode = ssl.CERT_REQUIRED
        ca.configure_trust(tls)
        options = ("--upstream.ca_file", str(ca_file), "--upstream.certificate_file", str(client_file))

    with (
        emulated(tmp_path / "emulator.log") as ((url,), _),
        behind_tls(url, tls) as secure,
        running_fleet(tmp_path, (*QUICK, *TOKENIZES, *options)) as fleet,
    ):
        fleet.dualmap("instances", "add", "secure", secure, "--url", fleet.endpoint)
        until(lambda: fleet.instances()["secure"]["state"] == "ready", "it is ready")
        [other] = fleet.instances().keys() - {"secure"}
        fleet.dualmap("instances", "drain", other, "--url", fleet.endpoint)
        until(lambda: fleet.instances()[other]["state"] == "standby", "the other one is parked")

        assert [ask(fleet, stream=stream)[0] for stream in (False, True)] == ["secure", "secure"]
        assert fleet.get("/v1/models")["data"][0]["max_model_len"] > 0

        def tokenizes() -> bool:  # a busy machine may be too slow for the first prompts
            ask(fleet, stream=False)
            with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
                lines = answer.read().decode().splitlines()
            exact = [line for line in lines if line.startswith("dualmap_tokenized_prompts_total") and '"exact"' in line]
            return any(float(line.split()[-1]) > 0 for line in exact)

        until(tokenizes, "its tokens are known in time")


def test_an_instance_whose_ca_nobody_named_says_so(tmp_path: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("localhost").configure_cert(tls)
    with (
        emulated(tmp_path / "emulator.log") as ((url,), _),
        behind_tls(url, tls) as secure,
        running_fleet(tmp_path, QUICK) as fleet,
    ):
        fleet.dualmap("instances", "add", "secure", secure, "--url", fleet.endpoint)
        trouble = until(lambda: fleet.instances()["secure"].get("trouble"), "its check says what is wrong")
        assert "certificate" in trouble and "upstream.ca_file" in trouble


def test_an_endpoint_follows_its_certificate_and_reports_one_that_it_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, ca_file = trustme.CA(), tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    files = mounted(tmp_path / "tls", ca.issue_cert("127.0.0.1"))
    options = ("--router.tls_certificate", str(files.certificate), "--router.tls_key", str(files.key))

    def shown(fleet: Fleet) -> str:
        port = urlsplit(fleet.endpoint).port
        assert port is not None
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            client_tls(ca).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            certificate = connection.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    def state(fleet: Fleet) -> dict[str, str | None]:
        found: dict[str, str | None] = fleet.get("/health")["certificates"]["router.tls_certificate"]
        return found

    with running_fleet(tmp_path, (*QUICK, *options)) as fleet:
        assert fleet.endpoint.startswith("https://")
        assert ask(fleet, stream=True)[1].endswith(b"data: [DONE]\n\n")
        first, expires = shown(fleet), state(fleet)["expires"]
        assert expires is not None and state(fleet)["problem"] is None

        files.renew(ca.issue_cert("127.0.0.1"))
        second = until(lambda: (number := shown(fleet)) != first and number, "the renewed certificate is shown")
        files.renew(ca.issue_cert("127.0.0.1"), key=b"no key")
        problem = until(lambda: state(fleet)["problem"], "the broken certificate is reported")
        assert "router.tls_key" in problem
        assert shown(fleet) == second
        with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
            assert 'dualmap_tls_certificate_problem{certificate="router.tls_certificate"} 1.0' in answer.read().decode()
        assert ask(fleet, stream=False)[1]
