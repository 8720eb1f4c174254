"""How long one request's body blocks a replica's event loop, for shapes of bodies that cost most to read.

A replica with its defaults and an embedded Valkey. A task of its loop wakes up every millisecond, and notes its largest
delay, and the CPU time of the loop meanwhile: on a busy machine the rest belongs to other processes. Each shape is sent
at several sizes, and as large as it is accepted; refused bodies cost time as well.

    python benchmarks/loop_blocking.py [--shapes NAME,NAME] [--sizes 65536,8000000,32000000] [--repetitions 3]
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, cast

import orjson
import uvloop

from dualmap.router.serving.serve import serve
from dualmap.router.settings import RouterSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.settings import StoreSettings

TICK_S: Final = 0.001
HEAD: Final = b"POST %b HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
ANSWER: Final = b'{"object":"chat.completion","choices":[],"usage":{"prompt_tokens":9}}'
CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"
EMBEDDINGS: Final = b"/v1/embeddings"


def listed(item: bytes, size: int) -> bytes:
    return b"[" + b",".join([item] * max(1, size // (len(item) + 1))) + b"]"


def numbered(item: bytes, size: int) -> bytes:
    """``item`` with another number in each."""
    count = max(1, size // (len(item) + 8))
    return b",".join([item % n for n in range(count)])


def chat(messages: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
    return CHAT, b'{"model":"default","messages":' + messages + more + b"}"


def said(content: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
    return chat(b'[{"role":"user","content":' + content + b"}]", more)


def completion(prompt: bytes) -> tuple[bytes, bytes]:
    return COMPLETIONS, b'{"model":"default","prompt":' + prompt + b"}"


def text(unit: bytes, size: int) -> bytes:
    return b'"' + unit * (size // len(unit)) + b'"'


Shape = Callable[[int], tuple[bytes, bytes]]
"""The path and the body of about that many bytes."""

SHAPES: Final[dict[str, Shape]] = {
    "small messages": lambda size: chat(listed(b'{"role":"","content":"","a":1}', size)),
    "empty arrays as messages": lambda size: chat(listed(b"[]", size)),
    "prompts of one token": lambda size: completion(listed(b"[1]", size)),
    "prompts of one letter": lambda size: completion(listed(b'"a"', size)),
    "content parts": lambda size: said(listed(b'{"type":"text","text":""}', size)),
    "content parts as strings": lambda size: said(listed(b'""', size)),
    "media parts": lambda size: said(listed(b'{"type":"a"}', size)),
    "tools": lambda size: said(b'"hi"', b',"tools":' + listed(b"{}", size)),
    "keys of a tool": lambda size: said(b'"hi"', b',"tools":[{' + numbered(b'"k%07d":1', size) + b"}]"),
    "keys of a message": lambda size: chat(b'[{"role":"user",' + numbered(b'"k%07d":1', size) + b"}]"),
    "keys of the body": lambda size: said(b'"hi"', b"," + numbered(b'"k%07d":1', size)),
    "keys called model": lambda size: said(b'"hi"', b',"a":' + listed(b'{"model":"x"}', size)),
    "token ids of one digit": lambda size: completion(listed(b"1", size)),
    "token ids": lambda size: completion(listed(b"100000", size)),
    "inputs of embeddings": lambda size: (EMBEDDINGS, b'{"model":"default","input":' + listed(b'"a"', size) + b"}"),
    "one text": lambda size: said(text(b"word ", size)),
    "one text with an emoji": lambda size: said(text(b"x", size)[:-1] + "\N{GRINNING FACE}".encode() + b'"'),
    "one Chinese text": lambda size: said(text("\u4e2d".encode(), size)),
    "one escaped Chinese text": lambda size: said(text(b"\\u4e2d", size)),
    "one text of line breaks": lambda size: said(text(b"\\n", size)),
    "one text of quotes": lambda size: said(text(b'\\"', size)),
    "one text of braces": lambda size: said(text(b"{[,]}", size)),
    "texts of 60 KB with emoji": lambda size: chat(
        listed(b'{"role":"user","content":' + text("\N{GRINNING FACE}".encode(), 60_000) + b"}", size)
    ),
    "one image": lambda size: said(
        b'[{"type":"image_url","image_url":{"url":"data:image/png;base64,' + b"iVBORw0KGgo" * (size // 11) + b'"}}]'
    ),
    "embedded prompt": lambda size: (
        COMPLETIONS,
        b'{"model":"default","prompt":"","prompt_embeds":' + text(b"AAAA", size) + b"}",
    ),
    "an alias, one text": lambda size: (CHAT, said(text(b"word ", size))[1].replace(b'"default"', b'"alias"', 1)),
    "arrays for /admin": lambda size: (b"/admin/ring", b'{"messages":' + listed(b"[]", size) + b"}"),
    "open brackets": lambda size: chat(b"[" * size),
    "a string without an end": lambda size: chat(b'"' + b"x" * size),
    "blanks": lambda size: said(b'"hi"' + b" " * size),
}


# the instance ----------------------------------------------------------------------------------------------------
class MockInstance(asyncio.Protocol):
    """Answers every request when its last byte has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._head = b""
        self._left = 0

    def data_received(self, data: bytes) -> None:
        if not self._left:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            self._head = b""
            self._left = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        self._left -= len(data)
        if self._left == 0:
            fields = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
            self._transport.write(b"HTTP/1.1 200 OK\r\n" + fields + ANSWER)


# the replica -----------------------------------------------------------------------------------------------------
async def watch(worst: list[float]) -> None:
    """Note the longest time for which the loop did not come round, and the most CPU time that it took meanwhile."""
    while True:
        slept_from_s, cpu_s = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TICK_S)
        worst[0] = max(worst[0], time.perf_counter() - slept_from_s - TICK_S)
        worst[1] = max(worst[1], time.thread_time() - cpu_s)


def run_replica(store_url: str, parent: Connection) -> None:
    """The child process: sends its port; from then on answers each message with the figures since the last one."""
    logging.basicConfig(level=logging.ERROR)
    worst, cpu_s = [0.0, 0.0], time.process_time()

    def tell() -> None:
        nonlocal cpu_s
        parent.recv()
        now_s = time.process_time()
        status = Path("/proc/self/status").read_text()
        peak_mb = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        parent.send((worst[0] * 1e3, worst[1] * 1e3, (now_s - cpu_s) * 1e3, peak_mb))
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins again
        worst[:], cpu_s = [0.0, 0.0], now_s

    async def run() -> None:
        watching = asyncio.create_task(watch(worst))
        asyncio.get_running_loop().add_reader(parent.fileno(), tell)
        pools = [PoolSettings(aliases=("alias",))]
        on_ready = lambda port, _: parent.send(port)  # noqa: E731
        settings = RouterSettings(port=0, settle_s=0.0)
        await serve(settings, SchedulingSettings(), StoreSettings(url=store_url), pools, on_ready=on_ready)
        watching.cancel()

    uvloop.run(run())


def start_replica(store_url: str) -> tuple[multiprocessing.process.BaseProcess, Connection, int]:
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=run_replica, args=(store_url, child))
    process.start()
    if not parent.poll(30):
        raise TimeoutError("the replica did not start")
    return process, parent, parent.recv()


# the measurement -------------------------------------------------------------------------------------------------
async def ask(port: int, path: bytes, body: bytes) -> tuple[int, str]:
    """Status and code of the error, if any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % (path, len(body)) + body)
    head = await reader.readuntil(b"\r\n\r\n")
    fields = head.lower().decode("latin-1")
    length = int(fields.partition("content-length: ")[2].partition("\r\n")[0])
    answer = orjson.loads(await reader.readexactly(length))
    writer.close()
    error = answer.get("error") or {}
    return int(fields.split()[1]), error.get("message", "")


async def largest_taken(port: int, shape: Shape, limit: int) -> int:
    """Find by halving the largest size that is not refused, to a tenth."""
    low, high = 0, limit
    if (await ask(port, *shape(limit)))[0] == 200:
        return limit
    while high - low > max(2_000, high // 10):
        middle = (low + high) // 2
        if (await ask(port, *shape(middle)))[0] == 200:
            low = middle
        else:
            high = middle
    return low


async def rows(options: argparse.Namespace, port: int, replica: Connection) -> Iterator[str]:
    def seen() -> tuple[float, float, float, float]:
        replica.send(None)
        return cast("tuple[float, float, float, float]", replica.recv())

    lines = []
    sizes = [int(size) for size in options.sizes.split(",")]
    names = options.shapes.split(",") if options.shapes else list(SHAPES)
    for name in names:
        shape = SHAPES[name]
        taken = await largest_taken(port, shape, sizes[-1])
        for size in sorted({*sizes, taken} - {0}):
            path, body = shape(size)
            runs = []
            status, message = 0, ""
            for _ in range(options.repetitions):
                await asyncio.sleep(0.1)
                seen()
                status, message = await ask(port, path, body)
                await asyncio.sleep(0.3)
                runs.append(seen())
            blocked_ms, blocked_cpu_ms, cpu_ms, peak_mb = (max(run) for run in zip(*runs, strict=True))
            figures = f"{blocked_ms:10.1f} {blocked_cpu_ms:8.1f} {cpu_ms:8.0f} {peak_mb:8.0f}"
            row = f"{name:28} {len(body):>10,} {status} {figures}  {message[:70]}"
            print(row, flush=True)
            lines.append(row)
    return iter(lines)


async def measure(options: argparse.Namespace) -> None:
    mock = await asyncio.get_running_loop().create_server(MockInstance, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
    store_url = f"embedded://{Path(tempfile.mkdtemp(prefix='dualmap-')) / 'valkey.sock'}"
    store = await open_store(StoreSettings(url=store_url), scheduling=SchedulingSettings())
    try:
        for number in range(8):
            spec = InstanceSpec(f"instance-{number}", url, state=InstanceState.READY, prefill_tokens_per_s=1e9)
            await store.pool("default").members.put_instance(spec)
        process, replica, port = await asyncio.to_thread(start_replica, store_url)
        try:
            print(f"{'shape':28} {'bytes':>10}      {'blocked ms':>10} {'of CPU':>8} {'CPU ms':>8} {'peak MB':>8}")
            await rows(options, port, replica)
        finally:
            process.terminate()
            await asyncio.to_thread(process.join, 20)
    finally:
        await store.close()
        mock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="all of them, unless named: " + ", ".join(SHAPES))
    parser.add_argument("--sizes", default="65000,1000000,8000000,32500000", help="bytes of the part that repeats")
    parser.add_argument("--repetitions", type=int, default=3, help="the worst is printed")
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
