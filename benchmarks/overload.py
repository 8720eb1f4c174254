"""Is an overload shown as clients see it? The share on time that clients measure beside the one that the fleet shows.

    python benchmarks/overload.py [--load 1.75] [--seconds 120] [--impatient 0.4] [--replicas 2] [--instances 4]

Starts ``dualmap up`` with emulated instances, sends more than they can prefill, at an even rate and with prompts of
their own, and compares over the same window what clients see with what the live page's stream, ``dualmap top --json``
and ``/metrics`` have counted. A part of the clients leaves after a while of its own; the others wait. A client counts
as the fleet does: a request is on time if its first token comes within the SLO, it is not if the SLO passes without one
or if it is refused, and it is neither if the client leaves before. Exit code 1 where a share differs by more than two
points, or where page, ``top`` or ``/health`` say nothing of the overload.

A time scale above 1 makes the emulated engines faster and leaves the SLO: keep it at 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dualmap.research.chaos.fleet_process import FleetProcess

POINTS = 2.0
SLO_S = 5.0
PROMPT_TOKENS = 8000
CAPACITY_TOKENS_PER_S = 8280
"""Prefill rate of an emulated instance of the default preset, for prompts of this length."""
READY_S = 120.0


@dataclass(slots=True)
class Seen:
    """The outcomes that clients saw, by the time at which each was decided."""

    on_time_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    near_s: list[float] = field(default_factory=list)
    """Times to first token within half a second of the SLO: a queue by deadlines serves many just in time."""
    left: int = 0
    """Clients that left before the SLO had passed."""

    def counts(self, since_s: float, until_s: float) -> tuple[int, int]:
        within = [sum(since_s <= at_s < until_s for at_s in times) for times in (self.on_time_s, self.late_s)]
        return within[0], within[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=1.75, help="times what the instances can prefill")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--impatient", type=float, default=0.4, help="share of clients that leave after 2 to 20 s")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--picture", type=Path, help="make a picture of the page there at the end (needs chromium)")
    parser.add_argument("options", nargs="*", help="options of dualmap up, behind --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder), arguments) as fleet:
        return asyncio.run(compare(fleet, arguments))


@contextmanager
def running(folder: Path, arguments: argparse.Namespace) -> Iterator[FleetProcess]:
    options = [
        "--port", "0", "--emulator.port", "21700", "--time-scale", "1", "--instances", str(arguments.instances),
        "--replicas", str(arguments.replicas), "--scheduling.slo_ttft_s", str(SLO_S), *arguments.options,
    ]  # fmt: skip
    fleet = FleetProcess.start(folder, options)
    try:
        until_s = time.monotonic() + READY_S
        while not fleet.is_ready:
            assert time.monotonic() < until_s, fleet.output
            time.sleep(0.2)
        yield fleet
        fleet.stop()
    finally:
        fleet.kill_all()


async def compare(fleet: FleetProcess, arguments: argparse.Namespace) -> int:
    seen, model, endpoint = Seen(), fleet.model, fleet.endpoint
    rate = arguments.load * arguments.instances * CAPACITY_TOKENS_PER_S / PROMPT_TOKENS
    print(f"{rate:.1f} requests/s of {PROMPT_TOKENS:,} tokens, {arguments.load:g} times the capacity, for "
          f"{arguments.seconds:g} s; {arguments.impatient:.0%} of clients leave after 2 to 20 s")  # fmt: skip
    rng, clients = random.Random(1), set[asyncio.Task[None]]()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        before = await shown(http, fleet)
        lags_s: list[float] = []
        lag = asyncio.create_task(note_lags(lags_s))
        looks: asyncio.Task[dict[str, str]] | None = None
        since_s = time.monotonic()
        sent = 0
        while (now_s := time.monotonic()) < since_s + arguments.seconds:
            if looks is None and now_s > since_s + 0.6 * arguments.seconds:
                looks = asyncio.create_task(look(http, fleet, arguments.picture))
            if sent <= (now_s - since_s) * rate:
                sent += 1
                leaves_s = rng.uniform(2.0, 20.0) if rng.random() < arguments.impatient else None
                body = {"model": model, "stream": True, "max_tokens": 16, "prompt": prompt(rng)}
                task = asyncio.create_task(client(http, f"{endpoint}/v1/completions", body, leaves_s, seen))
                clients.add(task)
                task.add_done_callback(clients.discard)
            else:
                await asyncio.sleep(0.01)
        assert looks is not None
        pages = await looks
        await asyncio.sleep(2.5)  # heartbeats carry the counts
        until_s = time.monotonic()
        after = await shown(http, fleet)
        lag.cancel()
        for each in tuple(clients):
            each.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    on_time, late = seen.counts(since_s, until_s)
    true = 100 * on_time / max(1, on_time + late)
    print(f"\nclients: {on_time} on time, {late} not, {seen.left} left before the SLO: {true:.1f} % on time")
    print(f"{len(seen.near_s)} first tokens came within 0.5 s of the SLO as clients saw it")
    print(f"the clients' own loop was late by {sorted(lags_s)[int(0.99 * len(lags_s))]:.3f} s at P99: what it is late"
          " by is in what they see, so a busy machine shows a difference that is none of the fleet's")  # fmt: skip
    arrived = after.pop("arrived")[0] - before["arrived"][0]
    if arrived < 0.97 * sent:
        print(f"only {arrived} of {sent} requests have reached a router: this machine is too busy for a comparison")
    wrong = False
    for place, (met, missed) in after.items():
        counted = met - before[place][0], missed - before[place][1]
        share = 100 * counted[0] / max(1, sum(counted))
        wrong |= abs(share - true) > POINTS
        print(f"{place}: {counted[0]} on time, {counted[1]} not: {share:.1f} %, {share - true:+.1f} points")
    print()
    for place, words in pages.items():
        wrong |= not words
        print(f"{place} says: {words or 'nothing'}")
    return int(wrong)


async def note_lags(lags_s: list[float]) -> None:
    """Note how late this process wakes up. Runs until cancelled."""
    while True:
        due_s = time.monotonic() + 0.05
        await asyncio.sleep(0.05)
        lags_s.append(time.monotonic() - due_s)


async def client(http: httpx.AsyncClient, url: str, body: Any, leaves_s: float | None, seen: Seen) -> None:
    """One client, which leaves after a while where it is impatient."""
    began_s, judged = time.monotonic(), False

    def late() -> None:
        nonlocal judged
        if not judged:
            judged = True
            seen.late_s.append(time.monotonic())

    deadline = asyncio.get_running_loop().call_later(SLO_S, late)
    try:
        async with asyncio.timeout(leaves_s):
            async with http.stream("POST", url, json=body) as answer:
                if answer.status_code != 200:
                    return late()
                async for line in answer.aiter_lines():
                    if not judged and line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                        judged = True
                        if abs(time.monotonic() - began_s - SLO_S) < 0.5:
                            seen.near_s.append(time.monotonic() - began_s)
                        times = seen.on_time_s if time.monotonic() - began_s <= SLO_S else seen.late_s
                        times.append(time.monotonic())
            late()
    except TimeoutError:
        seen.left += not judged
        judged = True
    except httpx.HTTPError:
        late()
    finally:
        deadline.cancel()


def prompt(rng: random.Random) -> str:
    """A prompt that shares nothing with another one."""
    return " ".join(f"{rng.getrandbits(28):07x}" for _ in range(PROMPT_TOKENS // 2))


async def shown(http: httpx.AsyncClient, fleet: FleetProcess) -> dict[str, tuple[int, int]]:
    """The requests on time, and not, that each place has counted so far."""
    page = (await http.get(f"{fleet.endpoint}/metrics")).text
    counters = [float(found) for name in ("met", "missed") for found in [_sample(page, name)]]
    top = json.loads(await _dualmap("top", "--json", "--store.url", fleet.store_url))["default"]["counted"]
    feed = (await hello(http, fleet.endpoint))["pools_now"]["default"]["traffic"]
    arrived = re.search(r'^dualmap_arrived_requests_total{pool="default"} (\S+)', page, re.MULTILINE)
    return {
        "arrived": (round(float(arrived[1])) if arrived else 0, 0),
        "/metrics": (round(counters[0]), round(counters[1])),
        "dualmap top": (top["on_time"], top["late"]),
        "the page": (feed["on_time"], feed["late"]),
    }


async def look(http: httpx.AsyncClient, fleet: FleetProcess, path: Path | None) -> dict[str, str]:
    """The reports of each place in the middle of the overload, and a picture of the page."""
    pages = await said(http, fleet)
    if path is not None:
        await asyncio.to_thread(picture, fleet.endpoint, path)
    return pages


async def said(http: httpx.AsyncClient, fleet: FleetProcess) -> dict[str, str]:
    """The report of each place on the overload; "" where there is none."""
    first = (await hello(http, fleet.endpoint))["problems"][:1]
    top = (await _dualmap("top", "--once", "--store.url", fleet.store_url)).splitlines()
    pool = (await http.get(f"{fleet.endpoint}/health")).json()["pools"]["default"]
    return {
        "the page": " | ".join(
            f"{each['severity']}: {each['what']}: {each['why']}" for each in first if _is_it(each["what"])
        ),
        "dualmap top": " ".join(line.strip() for line in top[:3]) if top and _is_it(top[0]) else "",
        "/health": pool["problem"] or "",
    }


def _is_it(words: str) -> bool:
    return "Overload" in words


async def hello(http: httpx.AsyncClient, endpoint: str) -> Any:
    """The first frame of the live page's stream that has figures."""
    async with http.stream("GET", f"{endpoint}/ui/stream") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and (frame := json.loads(line[6:])).get("pools_now"):
                return frame
    raise AssertionError("the page's stream ended")


def _sample(page: str, slo: str) -> str:
    found = re.search(rf'^dualmap_slo_total{{pool="default",slo="{slo}"}} (\S+)', page, re.MULTILINE)
    return found[1] if found else "0"


async def _dualmap(*words: str) -> str:
    def run() -> str:
        command = [sys.executable, "-m", "dualmap", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    return await asyncio.to_thread(run)


def picture(endpoint: str, path: Path) -> None:
    """The page as a person sees it who opens it now."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000}, reduced_motion="reduce")
        page.goto(f"{endpoint}/ui")
        page.wait_for_selector("#requests tbody tr")
        page.wait_for_timeout(3000)
        page.screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    raise SystemExit(main())
