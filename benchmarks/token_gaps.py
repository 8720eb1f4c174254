"""Gaps between two tokens of a stream, as a client sees them: direct, through the router, through haproxy and router.

An instance writes a token every 28 ms. A hop that delays small writes shows as gaps of 0 and of some hundred ms instead
of 28, and as a late first token.

    python benchmarks/token_gaps.py                     everything on this machine; haproxy where it is installed
    python benchmarks/token_gaps.py direct=http://172.18.0.3:8000 haproxy=http://127.0.0.1:8000

The second form measures running servers: the same model behind all URLs, and no other traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import orjson
import uvloop
from router_overhead import MockInstance, Router, start_router

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.connect import open_store
from dualmap.statestore.settings import StoreSettings

PACE_MS = 28
HAPROXY = Path(__file__).resolve().parents[1] / "deploy" / "haproxy" / "haproxy.cfg"


# one stream ------------------------------------------------------------------------------------------------------
async def arrivals_s(url: str, model: str, tokens: int) -> list[float]:
    """When each event of one streamed answer arrived, in seconds from the request. Bytes are looked at as they come
    from the socket: a client library would add its own delays."""
    parts = urlsplit(url)
    body = orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me about {time.monotonic_ns()}."}],
            "stream": True,
            "max_tokens": tokens,
        }
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-mock: {tokens},{PACE_MS}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(head.encode() + body)
    start_s, times_s, seen = time.perf_counter(), list[float](), b""
    while b"data: [DONE]" not in seen:
        data = await reader.read(1 << 16)
        if not data or b"HTTP/1.1 200" not in seen + data:
            raise SystemExit(f"{url} answered {(seen + data)[:400].decode(errors='replace')!r}")
        times_s += [time.perf_counter() - start_s] * data.count(b'"content"')
        seen += data
    writer.close()
    return times_s


async def measure(name: str, url: str, model: str, streams: int, tokens: int) -> str:
    """One line of the table: the gaps of ``streams`` answers, one after the other."""
    first_s, gaps_s = list[float](), list[float]()
    for _ in range(streams):
        times_s = await arrivals_s(url, model, tokens)
        first_s.append(times_s[0])
        gaps_s += [after - before for before, after in itertools.pairwise(times_s)]
    cuts = statistics.quantiles(gaps_s, n=100)
    bunched = sum(gap < PACE_MS / 4000 for gap in gaps_s) / len(gaps_s)
    figures = (statistics.median(first_s), cuts[0], cuts[49], cuts[98], max(gaps_s))
    return f"| {name} | {' | '.join(f'{1000 * figure:.1f}' for figure in figures)} | {bunched:.0%} |"


# everything on this machine --------------------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def local_servers() -> AsyncIterator[dict[str, str]]:
    """An instance that writes a token every 28 ms, a router before it, and haproxy before that."""
    async with contextlib.AsyncExitStack() as stack:
        mock = await asyncio.get_running_loop().create_server(MockInstance, "127.0.0.1", 0)
        stack.callback(mock.close)
        url = f"http://127.0.0.1:{mock.sockets[0].getsockname()[1]}"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dualmap-")))
        store_url = f"embedded://{folder / 'valkey.sock'}"
        store = await open_store(StoreSettings(url=store_url), scheduling=SchedulingSettings())
        stack.push_async_callback(store.close)
        spec = InstanceSpec("instance-0", url, state=InstanceState.READY, prefill_tokens_per_s=1e7)
        await store.pool("default").members.put_instance(spec)
        router = await asyncio.to_thread(start_router, "full", max(os.sched_getaffinity(0)), url, store_url, "", None)
        stack.callback(stop, router)
        urls = {"direct": url, "router": f"http://127.0.0.1:{router.port}"}
        if shutil.which("haproxy"):
            urls["haproxy"] = await stack.enter_async_context(local_haproxy(router.port, folder))
        yield urls


def stop(router: Router) -> None:
    router.process.terminate()
    router.process.join(20)


@contextlib.asynccontextmanager
async def local_haproxy(router_port: int, folder: Path) -> AsyncIterator[str]:
    """haproxy with the composed fleet's configuration, but other addresses of its own and of its one router."""
    port = free_port()
    text = HAPROXY.read_text()
    text = text.replace("default-path config", f"default-path origin {HAPROXY.parent}")
    text = text.replace("bind :8000\n", f"bind 127.0.0.1:{port}\n").replace("bind :8404\n", f"bind {folder}/health\n")
    text = re.sub(r"server-template .*", f"server router 127.0.0.1:{router_port} init-addr last,libc", text)
    text = re.sub(r"check port \d+", "check", text)  # this router has no port of its own for checks
    configuration = folder / "haproxy.cfg"
    configuration.write_text(text)
    haproxy = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", str(configuration))
    try:
        await until_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        if haproxy.returncode is None:
            haproxy.terminate()
        await haproxy.wait()


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(timeout=2.0) as client:
        for _ in range(200):
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise SystemExit(f"{url} did not become ready")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def run(options: argparse.Namespace) -> None:
    async with contextlib.AsyncExitStack() as stack:
        urls: dict[str, str] = dict(server.split("=", 1) for server in options.servers)
        model = options.model
        if not urls:
            urls, model = await stack.enter_async_context(local_servers()), "default"
        elif model is None:
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"{next(iter(urls.values()))}/v1/models")
                model = answer.json()["data"][0]["id"]
        print("| path | first token ms | gap P1 ms | P50 | P99 | max | gaps under 7 ms |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, url in urls.items():
            await measure(name, url, model, 1, options.tokens)  # connections, caches
            print(await measure(name, url, model, options.streams, options.tokens), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="NAME=URL", help="servers that run, in place of own ones")
    parser.add_argument("--model", help="for servers that run; the first that they list unless given")
    parser.add_argument("--streams", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
