"""Split requests while instances of either side die: is one lost, does one leave anything behind, are counts exact?

A fleet of emulated prefill and decode instances runs as `dualmap up` starts it. Clients stream; at random moments an
instance's process model dies abruptly and comes back with an empty cache. A request is *lost* if its answer is neither
whole nor an error: a stream that broke off after its first token must end with an error event, since it cannot be
continued. Afterwards nothing may be reserved, staged, running or leaked.

    python benchmarks/split_soak.py --requests 10000 --kills 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dualmap.simulation.http_client import HttpClient, HttpClientError

STREAMED_END = b"data: [DONE]"
QUIET_S = 60.0
"""For what is left to be released: the longest transfer without a client may take 30 s."""
COUNTS = ("pending_tokens", "dispatched_tokens", "context_tokens", "queued_requests", "running_requests")
OPTIONS = (
    "--router.replica_lease_s", "3", "--worker.lease_s", "1.5", "--worker.health_interval_s", "0.3",
    "--scheduling.split.mode", "always", "--emulator.transfer.latency_ms", "200",
)  # fmt: skip


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    answer, client = bytearray(), HttpClient(url)
    try:
        reply = await client.request("POST", path, json.dumps(body).encode(), on_body=answer.extend)
        return reply.status, bytes(answer)
    except HttpClientError:
        return 0, bytes(answer)
    finally:
        client.close()


async def read(url: str, path: str) -> Any:
    client = HttpClient(url)
    try:
        return json.loads((await client.read(path))[1])
    finally:
        client.close()


class Soak:
    def __init__(self, endpoint: str, seed: int) -> None:
        self.endpoint = endpoint
        self.outcomes: Counter[str] = Counter()
        self.odd: list[str] = []
        self._rng = random.Random(seed)

    async def ask(self, number: int, model: str) -> None:
        rng = random.Random(number)
        prompt = f"{number % 500:05d} " + "some words of a prompt " * rng.randrange(10, 400)
        stream = rng.random() < 0.7
        body = {"model": model, "prompt": prompt, "max_tokens": rng.randrange(2, 60), "stream": stream}
        if rng.random() < 0.05:  # a client that leaves
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.3)):
                    await post(self.endpoint, "/v1/completions", body)
            except TimeoutError:
                self.outcomes["left"] += 1
                return
        status, answer = await post(self.endpoint, "/v1/completions", body)
        self.outcomes[self._judge(status, answer, stream)] += 1

    def _judge(self, status: int, answer: bytes, stream: bool) -> str:
        if status == 200 and not stream:
            return "whole" if b'"choices"' in answer else self._lost(status, answer)
        if b'"error"' in answer:
            return "error in mid-stream" if status in (0, 200) else f"refused {status}"
        return "whole" if status == 200 and STREAMED_END in answer else self._lost(status, answer)

    def _lost(self, status: int, answer: bytes) -> str:
        self.odd.append(f"{status} {answer[-200:]!r}")
        return "lost"

    async def kill(self, url: str) -> None:
        abruptly = self._rng.random() < 0.5
        await post(url, "/emulator/die", {"abruptly": abruptly, "revive_after_s": self._rng.uniform(0.1, 1.0)})

    async def run(self, requests: int, kills: int, parallel: int) -> None:
        instances = (await read(self.endpoint, "/admin/instances"))["instances"]
        model = (await read(self.endpoint, "/v1/models"))["data"][0]["id"]
        limit, started = asyncio.Semaphore(parallel), Counter[str]()
        kill_at = set(self._rng.sample(range(requests // 20, requests), kills)) if kills else set()

        async def one(number: int) -> None:
            async with limit:
                started["requests"] += 1
                if number in kill_at:
                    await self.kill(self._rng.choice(instances)["url"])
                await self.ask(number, model)

        await asyncio.gather(*(one(number) for number in range(requests)))

    async def leftovers(self) -> dict[str, int]:
        """State that outlives its request, once nothing has come for a while; {} where nothing does."""
        end_s, left = time.monotonic() + QUIET_S, {"not looked": 1}
        while left and time.monotonic() < end_s:
            await asyncio.sleep(0.5)
            left = await self._left()
        return left

    async def _left(self) -> dict[str, int]:
        counts: Counter[str] = Counter(records=len(await read(self.endpoint, "/admin/requests")))
        for each in (await read(self.endpoint, "/admin/instances"))["instances"]:
            for name in (
                "pending_tokens",
                "dispatched_tokens",
                "context_tokens",
                "queued_requests",
                "running_requests",
            ):
                counts[name] += abs((each["load"] or {}).get(name, 0))
            try:
                statistics = await read(each["url"], "/emulator/statistics")
            except HttpClientError:
                counts["instances away"] += 1
                continue
            for name in ("staged", "running", "waiting", "expired"):
                counts[f"engine {name}"] += statistics[name]
        return {name: count for name, count in counts.items() if count}


async def soak(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "up.out"
        with log.open("wb") as out:
            fleet = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dualmap", "up", "--port", "0", "--emulator.port", str(arguments.port),
                "--prefill", str(arguments.prefill), "--decode", str(arguments.decode), "--replicas", "2",
                "--workers", "1", "--time-scale", "20", *OPTIONS, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            while "Try it:" not in log.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            endpoint = log.read_text().split("endpoint", 1)[1].split("/v1", 1)[0].strip()
            made, started_s = Soak(endpoint, arguments.seed), time.monotonic()
            await made.run(arguments.requests, arguments.kills, arguments.parallel)
            took_s, left = time.monotonic() - started_s, await made.leftovers()
        finally:
            fleet.send_signal(signal.SIGINT)
            await fleet.wait()
    lost = made.outcomes["lost"]
    print(f"{arguments.requests} requests, {arguments.kills} deaths of instances, {took_s:.0f} s")
    print(", ".join(f"{outcome}: {count}" for outcome, count in sorted(made.outcomes.items())))
    print(f"lost: {lost}; left over: {left or 'nothing'}")
    for each in made.odd[:5]:
        print("  ", each)
    return 1 if lost or left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--parallel", type=int, default=48, help="clients at a time")
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--port", type=int, default=23_500, help="first port of the emulated instances")
    parser.add_argument("--seed", type=int, default=1)
    return asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
