"""The endpoint picker: what it costs, and whether many of them place as well as one router.

cost  CPU of a picker for a streamed answer of 200 chunks, and the latency that it adds to a plain Envoy: where it sees
      no first token (``unseen``), where the gateway reports it (``reported``), and where the picker sees the body of
      every stream (``observed``); beside pickers that decide nothing, by grpc.aio (``plain``) and by the picker's own
      server (``bare``). The ways take turns. CPU is that of the process, read from the kernel.
knee  a trace at a rate near saturation through one router, then through Envoy with 1, 2 and 4 pickers and two routers
      at once, half of the connections each: hit rate and share on time.

    python benchmarks/picker.py cost [--requests 300] [--rounds 3]
    python benchmarks/picker.py knee [--trace toolagent] [--rate 12] [--requests 600]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from router_overhead import MockInstance, cpu_s

from dualmap.statestore.embedded import EmbeddedValkey
from tests.fleet.fleet_process import running_fleet, until
from tests.support.envoy_process import example, page, running_envoy, running_picker, without
from tests.support.ports import free_port

CHUNKS = 200
CONNECTIONS = 4
IDLE_S = 10.0
PROMPT = "word " * 400


# what is compared ------------------------------------------------------------------------------------------------
def mock_instance(port: int) -> None:
    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(MockInstance, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def bare_picker(port: int, destination: str) -> None:
    """A picker that reads the same messages, and always gives the same reply, by the server of ``dualmap picker``."""
    import uvloop

    from dualmap.router.picker import messages
    from dualmap.router.picker.ext_proc import SERVING, HealthCheckResponse, ProcessingRequest
    from dualmap.router.picker.grpc_server import GrpcServer, GrpcStream, Method

    reply = messages.destination_reply("request_body", destination, [], [])

    async def process(stream: GrpcStream) -> None:
        while (message := await stream.read()) is not None:
            kind = messages.kind_of(message)
            await stream.write(reply if kind == "request_body" else messages.GO_ON[kind])

    async def check(stream: GrpcStream) -> None:
        await stream.write(HealthCheckResponse(status=SERVING).SerializeToString())

    async def serve() -> None:
        methods = {
            f"/{messages.SERVICE}/{messages.METHOD}": Method(process, ProcessingRequest.FromString),
            "/grpc.health.v1.Health/Check": Method(check, bytes),
        }
        server = GrpcServer(methods, max_message_bytes=1 << 25)
        await server.listen("127.0.0.1", port)
        await server.start()
        await asyncio.Event().wait()

    uvloop.run(serve())


def plain_picker(port: int, destination: str) -> None:
    """A picker that does the same by grpc.aio."""
    import grpc
    import grpc.aio
    import uvloop

    from dualmap.router.picker import messages
    from dualmap.router.picker.ext_proc import SERVING, HealthCheckRequest, HealthCheckResponse, ProcessingRequest

    reply = messages.destination_reply("request_body", destination, [], [])

    async def process(_: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            kind = messages.kind_of(message)
            await context.write(reply if kind == "request_body" else messages.GO_ON[kind])

    async def check(_: Any, __: Any) -> Any:
        return HealthCheckResponse(status=SERVING)

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(process, ProcessingRequest.FromString)
        health = grpc.unary_unary_rpc_method_handler(
            check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(messages.SERVICE, {messages.METHOD: handler}),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": health}),
            )
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


@contextlib.contextmanager
def process_of(target: Any, *arguments: Any) -> Iterator[int]:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.kill()
        process.join()


async def streams(url: str, count: int, pace_ms: int) -> tuple[list[float], list[float]]:
    """Seconds to the first and to the last byte of so many streams, over a few connections."""
    first, last = [], []

    async def one_after_another(client: httpx.AsyncClient, share: int) -> None:
        for number in range(share):
            content = orjson.dumps(
                {"model": "mock", "prompt": f"{number % 50} {PROMPT}", "stream": True, "max_tokens": CHUNKS}
            )
            fields = {"content-type": "application/json", "x-mock": f"{CHUNKS},{pace_ms}"}
            began = time.perf_counter()
            async with client.stream("POST", f"{url}/v1/completions", content=content, headers=fields) as answer:
                assert answer.status_code == 200, await answer.aread()
                pieces = answer.aiter_raw()
                await anext(pieces)
                first.append(time.perf_counter() - began)
                async for _ in pieces:
                    pass
                last.append(time.perf_counter() - began)

    async with httpx.AsyncClient(timeout=60) as client:
        await asyncio.gather(*(one_after_another(client, count // CONNECTIONS) for _ in range(CONNECTIONS)))
    return first, last


def cost(requests: int, rounds: int, pace_ms: int) -> None:
    instance, plain, bare = (free_port() for _ in range(3))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(process_of(mock_instance, instance))
        plain_pid = stack.enter_context(process_of(plain_picker, plain, f"127.0.0.1:{instance}"))
        bare_pid = stack.enter_context(process_of(bare_picker, bare, f"127.0.0.1:{instance}"))
        config = folder / "fleet.yaml"
        pool = {"model": "mock", "instances": [{"id": "a", "url": f"http://127.0.0.1:{instance}"}]}
        store = stack.enter_context(EmbeddedValkey(unix_socket=folder / "store.sock"))
        config.write_text(json.dumps({"store": {"url": store.url}, "pools": [pool]}))
        unseen = ("--picker.observed_share", "0")
        picker = stack.enter_context(running_picker(folder, config, *unseen))
        seeing = stack.enter_context(running_picker(folder, config, "--picker.observed_share", "1"))
        for each in (picker, seeing):
            until(lambda each=each: page(f"{each.ops_url}/ready"), "the pickers are ready")  # type: ignore[misc]
        stack.enter_context(_worker(config))
        until(lambda: '"state":"ready"' in page(f"{picker.ops_url}/admin/instances"), "the instance is ready")
        ways: dict[str, tuple[str, int, int]] = {}
        for name, port, pid in (
            ("none", plain, 0),
            ("plain", plain, plain_pid),
            ("bare", bare, bare_pid),
            ("unseen", picker.port, picker.process.pid),
            ("reported", picker.port, picker.process.pid),
            ("observed", seeing.port, seeing.process.pid),
        ):
            dropped: tuple[str, ...] = {"none": ("lua", "ext_proc"), "reported": ()}.get(name, ("lua",))
            made = without(example(), *dropped)
            (folder / name).mkdir()
            envoy = stack.enter_context(running_envoy(folder / name, made, pickers=[port], instances=[instance]))
            until(lambda envoy=envoy: page(f"{envoy.admin_url}/ready"), "Envoy is ready")  # type: ignore[misc]
            ways[name] = envoy.url, pid, envoy.process.pid
        time.sleep(3)  # its first health check
        idle, began = cpu_s(picker.process.pid), time.perf_counter()
        time.sleep(IDLE_S)
        share = (cpu_s(picker.process.pid) - idle) / (time.perf_counter() - began)
        print(f"an idle picker takes {100 * share:.2f} % of a core")
        _compare(ways, requests, rounds, pace_ms)


def _compare(ways: dict[str, tuple[str, int, int]], requests: int, rounds: int, pace_ms: int) -> None:
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for url, _, _ in ways.values():
        asyncio.run(streams(url, 40, 0))
    for _ in range(rounds):
        for name, (url, pid, envoy) in ways.items():
            before = cpu_s(pid) if pid else 0.0, cpu_s(envoy)
            first, last = asyncio.run(streams(url, requests, pace_ms))
            after = cpu_s(pid) if pid else 0.0, cpu_s(envoy)
            spent = [1000 * (b - a) / len(first) for a, b in zip(before, after, strict=True)]
            found[name].append((*spent, 1000 * statistics.median(first), 1000 * statistics.median(last)))
    print("way      picker CPU ms  Envoy CPU ms  first byte P50 ms  last byte P50 ms (median of the rounds)")
    for name, rows in found.items():
        print(f"{name:8s}" + "".join(f"{statistics.median(column):14.2f}" for column in zip(*rows, strict=True)))


@contextlib.contextmanager
def _worker(config: Path) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", "dualmap", "worker", "--config", str(config)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


# the knee --------------------------------------------------------------------------------------------------------
async def _splice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.CancelledError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


def both_doors(port: int, doors: Sequence[int]) -> None:
    """Forwards connections to the doors in turn."""
    turns = itertools.cycle(doors)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", next(turns))
        await asyncio.gather(_splice(reader, behind_writer), _splice(behind_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(forward, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(serve())


def replayed(url: str, options: argparse.Namespace, salt: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, "-m", "dualmap", "replay", "--trace", options.trace, "--url", url, "--quiet"]
        command += ["--requests", str(options.requests), "--rate", str(options.rate), "--json", out.name]
        command += ["--seed", str(options.seed), "--salt", salt, "--skip", str(options.requests // 5)]
        command += ["--time-scale", str(options.time_scale)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(Path(out.name).read_text())
        return report


def knee(options: argparse.Namespace) -> None:
    for way in options.ways:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url = _opened(way, folder, stack, options)
            print(f"{_described(way)}: {summary(replayed(url, options, 'same'))}", flush=True)


def _described(way: str) -> str:
    named = {"router": "1 router", "routers": "2 routers", "envoy": "2 routers, half of it through a plain Envoy"}
    return named.get(way, f"{way} pickers, 2 routers")


def _opened(way: str, folder: Path, stack: contextlib.ExitStack, options: argparse.Namespace) -> str:
    """Start a fleet and what stands in front of it; returns the URL for the load."""
    scale = ("--time-scale", str(options.time_scale), "--instances", str(options.instances))
    replicas = "1" if way == "router" else "2"
    fleet = stack.enter_context(running_fleet(folder, ["--replicas", replicas, *scale]))
    if way in ("router", "routers"):
        return fleet.endpoint
    if way == "envoy":
        behind = [int(fleet.endpoint.rpartition(":")[2])]
        envoy = stack.enter_context(
            running_envoy(folder, without(example(), "lua", "ext_proc"), pickers=[free_port()], instances=behind)
        )
    else:
        config = fleet.directory / "fleet.yaml"
        share = () if options.observed_share is None else ("--picker.observed_share", str(options.observed_share))
        pickers = [stack.enter_context(running_picker(folder, config, *share)) for _ in range(int(way))]
        for each in pickers:
            until(lambda each=each: page(f"{each.ops_url}/ready"), "pickers are ready")  # type: ignore[misc]
        ports = [int(each["url"].rpartition(":")[2]) for each in fleet.instances().values()]
        envoy = stack.enter_context(
            running_envoy(folder, example(), pickers=[each.port for each in pickers], instances=ports)
        )
        time.sleep(3)
    if options.all_by_envoy:
        url = envoy.url
    else:
        port = free_port()
        doors = [int(each.rpartition(":")[2]) for each in (envoy.url, fleet.endpoint)]
        stack.enter_context(process_of(both_doors, port, doors))
        url = f"http://127.0.0.1:{port}"
    until(lambda: page(f"{url}/v1/models"), "the doors are open")
    return url


def summary(report: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in report.items() if not isinstance(value, (list, dict))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = parser.add_subparsers(dest="section", required=True)
    costing = sections.add_parser("cost")
    costing.add_argument("--requests", type=int, default=300)
    costing.add_argument("--rounds", type=int, default=3)
    costing.add_argument("--pace-ms", type=int, default=0, help="time between chunks; 0: as fast as they are sent")
    kneeing = sections.add_parser("knee")
    kneeing.add_argument("--trace", default="toolagent")
    kneeing.add_argument("--rate", type=float, default=12.0)
    kneeing.add_argument("--requests", type=int, default=600)
    kneeing.add_argument("--instances", type=int, default=8)
    kneeing.add_argument("--time-scale", type=float, default=1.0)
    kneeing.add_argument("--seed", type=int, default=1)
    kneeing.add_argument(
        "--ways",
        nargs="*",
        default=["router", "envoy", "1", "2", "4"],
        help="router: one router; routers: two; envoy: two, with a plain Envoy in front of half of the connections;"
        " a number: so many pickers, and two routers",
    )
    kneeing.add_argument("--observed-share", type=float, help="picker.observed_share (none: its default)")
    kneeing.add_argument("--all-by-envoy", action="store_true", help="all connections go through Envoy, not half")
    options = parser.parse_args()
    if options.section == "cost":
        cost(options.requests, options.rounds, options.pace_ms)
    else:
        knee(options)


if __name__ == "__main__":
    main()
