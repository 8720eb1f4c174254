"""A replica as a real process on a real Valkey: it serves, drains on SIGTERM, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from dualmap.router.admin.exposure import OpenAdminError
from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import InstanceSettings, PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import StoreConfigurationError
from dualmap.statestore.settings import StoreSettings
from tests.support.fork_servers import ForkedCommand, start_program

MODELS = b'{"data":[{"id":"default","max_model_len":4096}]}'
HELLO = {"model": "default", "prompt": "hello"}
COMPLETION = json.dumps(
    {"id": "x", "object": "text_completion", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
).encode()


@dataclass
class Instance:
    """A scripted server: it answers when the gate is open."""

    url: str
    gate: asyncio.Event
    asked: asyncio.Event


@pytest.fixture
async def instance() -> AsyncIterator[Instance]:
    gate, asked = asyncio.Event(), asyncio.Event()
    gate.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models "):
            answer = MODELS
        else:
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(length)
            asked.set()
            await gate.wait()
            answer = COMPLETION
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Instance(f"http://127.0.0.1:{port}", gate, asked)
    gate.set()
    server.close()


@dataclass
class Process:
    handle: ForkedCommand
    url: str
    ops_url: str
    out: Path

    def terminate(self) -> None:
        self.handle.send_signal(signal.SIGTERM)

    async def ends_well(self) -> bool:
        return await asyncio.to_thread(self.handle.wait, 60) == 0


StartProcess = Callable[..., Awaitable[Process]]

PROGRAM = textwrap.dedent(
    """
    import asyncio, json, sys
    from dualmap.router.serving.serve import serve
    from dualmap.router.settings import RouterSettings
    from dualmap.scheduling.settings import SchedulingSettings
    from dualmap.runtime.pool_settings import PoolSettings
    from dualmap.statestore.settings import StoreSettings
    router, store, pool = (json.loads(each) for each in sys.argv[1:])
    asyncio.run(serve(
        RouterSettings(**router), SchedulingSettings(), StoreSettings(**store), [PoolSettings(**pool)],
        on_ready=lambda port, ops_port: print(port, ops_port, flush=True),
    ))
    """
)


@pytest.fixture
async def start_process(valkey_url: str, tmp_path: Path) -> AsyncIterator[StartProcess]:
    """Starts replicas whose instance is ready; keywords are router settings."""
    started: list[ForkedCommand] = []

    async def start(instance_url: str, *, prelude: str = "", **settings: Any) -> Process:
        router = {"port": 0, "ops_port": 0, "settle_s": 0.0, "drain_timeout_s": 5, **settings}
        pool = {"instances": [{"id": "a", "url": instance_url}]}
        arguments = [json.dumps(each) for each in (router, {"url": valkey_url}, pool)]
        out = tmp_path / f"replica-{len(started)}.out"
        started.append(handle := start_program(prelude + PROGRAM, *arguments, out=out))
        port, ops_port = await asyncio.to_thread(ports_of, out)
        await make_ready(valkey_url)
        return Process(handle, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", out)

    yield start
    for handle in started:
        handle.kill()
        await asyncio.to_thread(handle.wait)


def ports_of(out: Path) -> list[str]:
    """The ports that a process has printed, once it has."""
    end_s = time.monotonic() + 60
    while not (found := re.search(r"^(\d+) (\d+)$", out.read_text(), re.MULTILINE)):
        assert time.monotonic() < end_s, out.read_text()
        time.sleep(0.01)
    return list(found.groups())


async def make_ready(valkey_url: str) -> None:
    """Stand in for the health check."""
    store = await open_store(StoreSettings(url=valkey_url), scheduling=SchedulingSettings())
    await store.pool("default").members.set_instance_state("a", InstanceState.READY)
    await store.close()


async def left_behind(valkey_url: str) -> tuple[int, int, int]:
    """Live requests, replicas, pending tokens, once the store has seen the last transition."""
    store = await open_store(StoreSettings(url=valkey_url), scheduling=SchedulingSettings())
    snapshot = await store.pool("default").snapshot()
    await store.close()
    return len(snapshot.requests), len(snapshot.replicas), sum(load.pending_tokens for load in snapshot.loads.values())


@contextlib.asynccontextmanager
async def in_flight(instance: Instance, url: str) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request that the instance has, and answers when the gate is open."""
    instance.gate.clear()
    async with httpx.AsyncClient(timeout=60) as client:
        request = asyncio.create_task(client.post(f"{url}/v1/completions", json=HELLO))
        await asyncio.wait_for(instance.asked.wait(), 60)
        yield request


@contextlib.asynccontextmanager
async def replica(store: StoreSettings, instance_url: str, **settings: Any) -> AsyncIterator[int]:
    """The port of a replica in this process, whose instance is ready; keywords are router settings. It has ended within
    a minute of the end of the test's block."""
    stop, ports = asyncio.Event(), asyncio.Queue[int]()
    serving = asyncio.create_task(
        serve(
            RouterSettings(port=0, settle_s=0.0, **settings),
            SchedulingSettings(),
            store,
            [PoolSettings(instances=(InstanceSettings(id="a", url=instance_url),))],
            stop=stop,
            on_ready=lambda port, _: ports.put_nowait(port),
        )
    )
    port = await asyncio.wait_for(ports.get(), 60)
    await make_ready(store.url)
    yield port
    stop.set()
    await asyncio.wait_for(serving, 60)


async def test_a_request_goes_through_both_ports_and_the_models_are_listed(
    start_process: StartProcess, instance: Instance, valkey_url: str
) -> None:
    process = await start_process(instance.url)

    async with httpx.AsyncClient() as client:
        for url in (process.url, process.ops_url):
            answer = await client.post(f"{url}/v1/completions", json=HELLO, headers={"x-request-id": "mine"})
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == "mine"
            assert answer.headers["x-dualmap-instance"] == "a"
            card = (await client.get(f"{url}/v1/models")).json()["data"][0]
            assert (card["id"], card["max_model_len"]) == ("default", 4096)
            assert (await client.get(f"{url}/ready")).status_code == 200


async def test_a_replica_full_of_connections_answers_on_its_own_port(
    start_process: StartProcess, instance: Instance
) -> None:
    process = await start_process(instance.url, max_connections=1)

    async with httpx.AsyncClient() as first, httpx.AsyncClient() as second, httpx.AsyncClient() as prober:
        assert (await first.get(f"{process.url}/ready")).status_code == 200
        assert (await second.get(f"{process.url}/ready")).status_code == 429
        assert (await prober.get(f"{process.ops_url}/ready")).status_code == 200


async def test_sigterm_turns_ready_off_finishes_what_is_in_flight_and_leaves_nothing(
    start_process: StartProcess, instance: Instance, valkey_url: str
) -> None:
    process = await start_process(instance.url, settle_s=0.5)
    async with in_flight(instance, process.url) as request:
        process.terminate()
        await until_draining(process.url)
        await until_closed(process.url)
        assert not request.done()
        # The replica's own port still tells that it drains: whoever finds it closed may take the replica for gone.
        async with httpx.AsyncClient(timeout=60) as client:
            assert (await client.get(f"{process.ops_url}/ready")).status_code == 503
            assert (await client.get(f"{process.ops_url}/health")).status_code == 200
        instance.gate.set()

        assert (await request).json()["object"] == "text_completion"
    assert await process.ends_well()
    assert await left_behind(valkey_url) == (0, 0, 0)


async def test_what_is_in_flight_on_its_own_port_is_finished_too(
    start_process: StartProcess, instance: Instance, valkey_url: str
) -> None:
    process = await start_process(instance.url)
    async with in_flight(instance, process.ops_url) as request:
        process.terminate()
        await until_closed(process.url)
        instance.gate.set()

        assert (await request).json()["object"] == "text_completion"
    assert await process.ends_well()
    assert await left_behind(valkey_url) == (0, 0, 0)


async def test_a_drain_that_takes_too_long_is_cut_with_an_answer_and_releases(
    start_process: StartProcess, instance: Instance, valkey_url: str
) -> None:
    process = await start_process(instance.url, drain_timeout_s=0.5)
    async with in_flight(instance, process.url) as request:
        process.terminate()

        cut = await request
        assert (cut.status_code, cut.json()["error"]["code"]) == (503, "shutting_down")
        assert "router.drain_timeout_s (0.5 s) is over" in cut.json()["error"]["message"]
    assert await process.ends_well()
    assert "cut off requests=1" in process.out.read_text()
    assert await left_behind(valkey_url) == (0, 0, 0)


async def talk_for_ever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An instance whose stream never ends, as fast as it is read."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b'data: {"choices": [{"text": "%b"}]}\n\n' % (b"x" * 60_000))
            await writer.drain()


async def test_a_client_that_does_not_read_that_its_request_was_cut_off_is_not_waited_for(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualmap.router.serving.serve.CUT_OFF_S", 0.3)
    instance = await asyncio.start_server(talk_for_ever, "127.0.0.1", 0)
    instance_url = f"http://127.0.0.1:{instance.sockets[0].getsockname()[1]}"
    body = json.dumps(HELLO | {"stream": True}).encode()

    with socket.socket() as client:
        async with replica(StoreSettings(url=valkey_url), instance_url, drain_timeout_s=0.3) as port:
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            loop = asyncio.get_running_loop()
            assert (await loop.sock_recv(client, 16)).startswith(b"HTTP/1.1 200")  # and no further

    assert await left_behind(valkey_url) == (0, 0, 0)
    instance.close()


async def until_draining(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            if (await client.get(f"{url}/ready")).status_code == 503:
                return
            await asyncio.sleep(0.02)


async def until_closed(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while True:
            try:
                await client.get(f"{url}/health", headers={"connection": "close"})
            except httpx.TransportError:
                return
            await asyncio.sleep(0.02)


async def test_two_replicas_share_one_port(start_process: StartProcess, instance: Instance) -> None:
    first = await start_process(instance.url)
    port = int(first.url.rpartition(":")[2])
    second = await start_process(instance.url, port=port)
    assert second.url == first.url

    seen: set[str] = set()
    async with asyncio.timeout(60):
        while len(seen) < 2:
            async with httpx.AsyncClient() as client:
                seen.add((await client.get(f"{first.url}/health")).json()["replica_id"])


async def test_metrics_of_a_shared_port_are_those_of_all_its_replicas_and_a_replicas_own_at_its_own(
    start_process: StartProcess, instance: Instance, valkey_url: str
) -> None:
    first = await start_process(instance.url)
    second = await start_process(instance.url, port=int(first.url.rpartition(":")[2]))
    replicas = (first, first, second)

    async def counted(url: str) -> float:
        async with httpx.AsyncClient() as client:  # another connection each time: the kernel gives it to either
            page = (await client.get(f"{url}/metrics")).text
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith("dualmap_requests_total{"))

    async with httpx.AsyncClient() as client:
        for replica in replicas:
            answer = await client.post(f"{replica.ops_url}/v1/completions", json={"model": "default", "prompt": "a"})
            assert answer.status_code == 200, answer.text

    async def all_are_known() -> bool:
        return [await counted(first.url) for _ in range(8)] == [3.0] * 8

    await until(all_are_known)
    assert [await counted(replica.ops_url) for replica in (first, second)] == [2.0, 1.0]


async def test_a_taken_port_stops_the_start_and_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            await serve(
                RouterSettings(port=port), SchedulingSettings(), StoreSettings(url="memory://"), [PoolSettings()]
            )


async def test_a_replica_that_its_clients_could_administer_does_not_start() -> None:
    router = RouterSettings(host="0.0.0.0", port=0, api_keys=["of-clients"])
    with pytest.raises(OpenAdminError, match=r"router\.admin_key"):
        await serve(router, SchedulingSettings(), StoreSettings(url="memory://"), [PoolSettings()])


async def test_a_form_on_a_web_page_drains_no_instance(start_process: StartProcess, instance: Instance) -> None:
    process = await start_process(instance.url)
    form = {"origin": "https://evil.example", "content-type": "application/x-www-form-urlencoded"}
    async with httpx.AsyncClient(base_url=process.url, trust_env=False) as client:
        (member,) = (await client.get("/admin/instances")).json()["instances"]
        drain = f"/admin/instances/{member['id']}/drain"

        refused = await client.post(drain, headers=form, content=b"a=b")
        rebound = await client.post(drain, headers={"host": "evil.example", "origin": "http://evil.example"})
        (after,) = (await client.get("/admin/instances")).json()["instances"]
        by_curl = await client.post(drain)

    assert [each.json()["error"]["code"] for each in (refused, rebound)] == ["foreign_page"] * 2
    assert (after["state"], by_curl.json()["state"]) == ("ready", "draining")


async def test_too_few_open_files_are_warned_of(start_process: StartProcess, instance: Instance) -> None:
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))\n"

    enough = await start_process(instance.url, prelude=limited, max_connections=22)
    assert "may open" not in enough.out.read_text()

    short = await start_process(instance.url, prelude=limited, max_connections=23)
    assert "this process may open 300 files, and router.max_connections (23) may take 302" in short.out.read_text()


async def test_a_replica_waits_for_a_store_that_is_not_there_until_it_is_told_to_stop() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
    stop = asyncio.Event()
    serving = asyncio.create_task(
        serve(RouterSettings(port=0), SchedulingSettings(), StoreSettings(url=url), [PoolSettings()], stop=stop)
    )
    await asyncio.sleep(0)
    assert not serving.done()

    stop.set()

    await asyncio.wait_for(serving, 60)


@pytest.mark.parametrize("url", ["memory://", "embedded://"])
async def test_a_store_that_no_worker_can_see_stops_the_start(url: str) -> None:
    with pytest.raises(StoreConfigurationError, match=rf"store\.url {url} is seen by one process only"):
        await serve(RouterSettings(port=0), SchedulingSettings(), StoreSettings(url=url), [PoolSettings()])


async def test_a_replica_goes_on_without_its_store_and_says_so(instance: Instance, tmp_path: Path) -> None:
    socket_path = tmp_path / "valkey.sock"
    server = EmbeddedValkey(unix_socket=socket_path)
    await asyncio.to_thread(server.start)
    store = StoreSettings(url=server.url, command_timeout_s=0.3)
    async with replica(store, instance.url, replica_lease_s=0.6) as port, httpx.AsyncClient(timeout=60) as client:
        url = f"http://127.0.0.1:{port}"

        async def store_state() -> str:
            state: str = (await client.get(f"{url}/health")).json()["pools"]["default"]["store"]
            return state

        async def answers() -> bool:
            return (await client.post(f"{url}/v1/completions", json=HELLO)).status_code == 200

        await until(answers)
        await asyncio.to_thread(server.stop)
        await until(lambda: answered(store_state(), "local"))
        assert await answers()
        await asyncio.to_thread(server.start)
        await until(lambda: answered(store_state(), "ok"))
        assert await answers()
        assert await left_behind(server.url) == (0, 1, 0)
    await asyncio.to_thread(server.stop)


async def answered(question: Awaitable[str], expected: str) -> bool:
    return await question == expected


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds; the test fails at the deadline."""
    async with asyncio.timeout(60):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)
