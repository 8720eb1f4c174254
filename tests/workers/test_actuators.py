"""Actuators: signed, bounded in time, the same key for the same decision, and never in the way of the round."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import trustme

from dualmap.runtime.discovery_settings import DiscoverySettings, KubernetesSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.scaling.scale_job import ActuatorReply
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.memory import MemoryStore
from dualmap.workers.actuators import Actuator, ActuatorCalls, Command, Webhook, actuator_of, decision_key
from dualmap.workers.workload import Workload
from tests.support.manual_clock import ManualClock

RECORD = ScaleRecord(decision_id=7, at_ms=1000, size=2, wanted=4, leaving=("a",), reason="crowd")
ECHO = "import sys; data = sys.stdin.read(); print(data); sys.exit({code})"


class Receiver:
    """A server that keeps what it got and answers what it is told."""

    def __init__(self) -> None:
        self.status = b"202 Accepted"
        self.hangs = False
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.url = ""
        self.serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):  # the caller gave up
            await self._answer(reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        if self.hangs:
            await reader.read()  # until the caller gives up
            return
        writer.write(b"HTTP/1.1 " + self.status + b"\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    made = Receiver()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/scale"
    yield made
    server.close()
    await asyncio.gather(*made.serving)


async def test_a_webhook_gets_the_decision_signed_and_with_its_key(receiver: Receiver) -> None:
    reply = await Webhook(receiver.url, "secret").call("default", RECORD)

    assert reply == ActuatorReply(True, "202 ok")
    headers, body = receiver.got[0]
    assert headers["x-dualmap-signature"] == "sha256=" + hmac.new(b"secret", body, hashlib.sha256).hexdigest()
    assert headers["idempotency-key"] == "default-7-1000" == decision_key("default", RECORD)
    told = orjson.loads(body)
    assert (told["wanted"], told["size"], told["leaving"], told["decision"]) == (4, 2, ["a"], "default-7-1000")


async def test_a_webhook_that_refuses_hangs_or_is_gone_is_an_answer(receiver: Receiver) -> None:
    receiver.status = b"503 Service Unavailable"
    assert (await Webhook(receiver.url, "s").call("default", RECORD)).text == "503 ok"
    receiver.hangs = True
    assert not (await Webhook(receiver.url, "s", timeout_s=0.05).call("default", RECORD)).accepted
    gone = await Webhook("http://127.0.0.1:1/", "s").call("default", RECORD)
    assert not gone.accepted
    assert "ConnectError" in gone.text


@pytest.mark.parametrize(("code", "accepted"), [(0, True), (3, False)])
async def test_a_command_gets_the_decision_on_its_input_and_its_exit_code_counts(code: int, accepted: bool) -> None:
    reply = await Command((sys.executable, "-c", ECHO.format(code=code))).call("default", RECORD)
    assert reply.accepted is accepted
    assert reply.text.startswith(f"exit {code}")
    assert '"attempt":1' in reply.text


async def test_a_command_that_hangs_is_killed_and_one_that_is_missing_is_told() -> None:
    slow = await Command((sys.executable, "-c", "import time; time.sleep(60)"), timeout_s=0.2).call("p", RECORD)
    assert "was killed" in slow.text
    missing = await Command(("/no/such/program",)).call("p", RECORD)
    assert missing == ActuatorReply(False, "/no/such/program: No such file or directory")


class Slow:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.calls: list[ScaleRecord] = []
        self.answers: asyncio.Queue[ActuatorReply] = asyncio.Queue()

    async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:
        self.calls.append(record)
        return await self.answers.get()

    async def close(self) -> None:
        """Nothing."""


async def until(holds: Callable[[], Awaitable[ActuatorReply | None]]) -> ActuatorReply:
    for _ in range(100):
        if (reply := await holds()) is not None:
            return reply
        await asyncio.sleep(0)
    raise AssertionError("no reply")


async def test_a_call_runs_beside_the_rounds_and_once_at_a_time(clock: ManualClock) -> None:
    slow = Slow()
    calls = ActuatorCalls(slow, "default", clock)
    assert await calls.actuate(RECORD) is None
    assert await calls.actuate(RECORD) is None
    assert len(slow.calls) == 1
    slow.answers.put_nowait(ActuatorReply(True, "yes"))
    assert (await until(lambda: calls.actuate(RECORD))).text == "yes"


async def test_a_failed_call_is_repeated_after_a_pause(clock: ManualClock) -> None:
    slow = Slow()
    calls = ActuatorCalls(slow, "default", clock)
    slow.answers.put_nowait(ActuatorReply(False, "no"))
    await until(lambda: calls.actuate(RECORD))
    assert await calls.actuate(RECORD) is None
    assert len(slow.calls) == 1
    clock.jump(2.0)
    assert await calls.actuate(RECORD) is None
    assert len(slow.calls) == 2
    await calls.close()


async def test_another_decision_gives_the_call_for_the_former_one_up(clock: ManualClock) -> None:
    slow = Slow()
    calls = ActuatorCalls(slow, "default", clock)
    await calls.actuate(RECORD)
    await calls.actuate(ScaleRecord(decision_id=8, at_ms=2000))
    assert [each.decision_id for each in slow.calls] == [7, 8]
    await calls.close()


def made(**autoscale: Any) -> Actuator | None:
    """The actuator of a pool with these settings."""
    kubernetes = DiscoverySettings(kubernetes=KubernetesSettings(label_selector="app=vllm"))
    settings = AutoscaleSettings(**{"max_instances": 3, **autoscale})
    pool = MemoryStore(SchedulingSettings()).pool("default")
    return actuator_of(PoolSettings(autoscale=settings, discovery=kubernetes), pool)


def test_the_settings_name_the_actuator() -> None:
    assert made() is None
    assert made(actuator="none") is None
    assert isinstance(made(actuator="command", command=("x",)), Command)
    assert isinstance(made(actuator="webhook", webhook_url="http://h", webhook_secret="s"), Webhook)
    assert isinstance(made(actuator="kubernetes", workload="deployment/vllm"), Workload)


async def test_the_next_call_waits_as_long_as_the_other_side_asks() -> None:
    class Busy:
        calls = 0

        async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:
            self.calls += 1
            return ActuatorReply(False, "429", retry_after_s=20.0)

        async def close(self) -> None:
            """Nothing."""

    busy, clock = Busy(), ManualClock()
    calls = ActuatorCalls(busy, "default", clock)
    await calls.actuate(RECORD)
    await clock.advance(19.0)
    assert await calls.actuate(RECORD) is None
    assert busy.calls == 1
    await clock.advance(1.5)
    await calls.actuate(RECORD)
    assert busy.calls == 2


async def test_a_webhook_with_a_certificate_of_the_systems_ca_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, made = trustme.CA(), Receiver()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(tls)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    url = f"https://localhost:{server.sockets[0].getsockname()[1]}/scale"
    refused = await Webhook(url, "secret").call("default", RECORD)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    accepted = await Webhook(url, "secret").call("default", RECORD)
    server.close()
    await asyncio.gather(*made.serving, return_exceptions=True)

    assert not refused.accepted and "CERTIFICATE_VERIFY_FAILED" in refused.text
    assert accepted == ActuatorReply(True, "202 ok")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "socks5h://127.0.0.1:1", "carrier-pigeon://x", "http://["])
async def test_a_proxy_of_the_environment_that_cannot_be_used_is_an_answer(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    reply = await Webhook("http://hooks.example/scale", "secret").call("default", RECORD)
    assert not reply.accepted and reply.text.startswith("http://hooks.example/scale: ")


async def test_a_webhook_is_asked_over_a_socks_proxy(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """SOCKS 5 without authentication, and the receiver at the end of every way."""
        await reader.readexactly(3)
        writer.write(b"\x05\x00")
        head = await reader.readexactly(5)
        await reader.readexactly(head[4] + 2)
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        await receiver.serve(reader, writer)

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    monkeypatch.setenv("ALL_PROXY", f"socks5://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    reply = await Webhook("http://hooks.example/scale", "secret").call("default", RECORD)
    server.close()
    assert reply == ActuatorReply(True, "202 ok")


async def test_the_password_of_a_webhooks_url_is_sent_and_never_shown(receiver: Receiver) -> None:
    url = receiver.url.replace("http://", "http://user:hunter2@")
    assert (await Webhook(url, "secret").call("default", RECORD)).accepted
    assert receiver.got[0][0]["authorization"].startswith("basic ")
    gone = await Webhook("http://user:hunter2@127.0.0.1:1/", "secret").call("default", RECORD)
    assert not gone.accepted and "hunter2" not in gone.text and "127.0.0.1:1" in gone.text
