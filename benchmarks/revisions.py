"""Revisions on a live emulated fleet: what a growing weight, and a rollout of a worse engine, do to sessions.

Four instances are of revision ``v1``, four of ``v2``. Conversations of several turns come at a steady rate, each with a
system prompt that many share and a context that grows. Figures are seconds of the engines.

    python -m benchmarks.revisions weights            # 5 -> 10 -> 50 %: sessions moved, hits by minute with and without
    python -m benchmarks.revisions rollout --slower 1.5
    python -m benchmarks.revisions rollout --errors 0.02
    python -m benchmarks.revisions rollout            # an equal one
    python -m benchmarks.revisions rollout --shadow 50 --seed 1     # answers differ, as a shadow first
    python -m benchmarks.revisions shadow --time-scale 2 --rate 6   # first tokens by turns, with copies and without
    python -m benchmarks.revisions upgrade            # eight instances under 200 streams, in real time: streams cut
    python -m benchmarks.revisions upgrade --time-scale 0.33 --tokens 100 --gate --at-once 2   # slower, by the gate
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from dualmap.research.chaos.fleet_process import FleetProcess, unconfigured
from dualmap.simulation.workload.trace_figures import quantile

TURNS = 6
THINK_S = 20.0
SLO_S = 5.0
_WORDS = tuple(f"word{number}" for number in range(16))


@dataclass
class Seen:
    """One answered turn."""

    at_s: float
    session: int
    turn: int
    revision: str
    status: int
    ttft_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Load:
    """Sessions that begin at a rate, each of several turns."""

    endpoint: str
    model: str
    per_s: float
    """Requests a second of the engines."""
    revisions: dict[str, str]
    scale: float
    seen: list[Seen] = field(default_factory=list)
    began_s: float = 0.0
    weighed_s: float = 0.0
    """When revisions had weights."""

    def now_s(self) -> float:
        return (time.monotonic() - self.began_s) * self.scale

    async def run(self, until: asyncio.Event) -> None:
        self.began_s, number = time.monotonic(), 0
        arrivals = random.Random(1)
        limits = httpx.Limits(max_connections=400)
        async with (
            httpx.AsyncClient(base_url=self.endpoint, timeout=120, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            while not until.is_set():
                group.create_task(self._session(client, number, until))
                number += 1
                await asyncio.sleep(arrivals.expovariate(self.per_s / TURNS) / self.scale)

    async def _session(self, client: httpx.AsyncClient, number: int, until: asyncio.Event) -> None:
        rng = random.Random(number)
        messages = [{"role": "system", "content": f"Prompt {number % 5}. " + " ".join(_WORDS * 40)}]
        for turn in range(TURNS):
            if until.is_set():
                return
            asked = " ".join(rng.choices(_WORDS, k=rng.randint(150, 900)))
            messages.append({"role": "user", "content": f"{number} {turn} {asked}"})
            await self._turn(client, number, turn, messages)
            messages.append({"role": "assistant", "content": " ".join(rng.choices(_WORDS, k=60))})
            await asyncio.sleep(rng.expovariate(1 / THINK_S) / self.scale)

    async def _turn(self, client: httpx.AsyncClient, number: int, turn: int, messages: list[Any]) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "messages": messages, "max_tokens": 30, "temperature": 0, **options}
        began_s = time.monotonic()
        at_s, ttft_s = self.now_s(), float("inf")
        usage: dict[str, Any] = {}
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        ttft_s = min(ttft_s, (time.monotonic() - began_s) * self.scale)
                        usage = json.loads(line[6:]).get("usage") or usage
            status, instance = answer.status_code, answer.headers.get("x-dualmap-instance", "")
        except httpx.HTTPError:
            status, instance = 599, ""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        revision = self.revisions.get(instance, "")
        self.seen.append(Seen(at_s, number, turn, revision, status, ttft_s, usage.get("prompt_tokens", 0), cached or 0))


@contextlib.contextmanager
def fleet(folder: Path, options: Namespace) -> Iterator[tuple[FleetProcess, dict[str, str]]]:
    """A fleet of four instances of ``v1`` and four of ``v2``, which are slower by a factor, and answer otherwise where
    their seed is not 0."""
    running = FleetProcess.start(
        folder,
        (
            "--port",
            "0",
            "--replicas",
            "2",
            "--workers",
            "1",
            "--instances",
            "4",
            "--time-scale",
            str(options.time_scale),
        ),
    )
    log = folder / "v2.out"
    engines = ("--time-scale", str(options.time_scale / options.slower), "--emulator.seed", str(options.seed))
    words = ("emulate", "--instances", "4", "--port", "0", *engines)
    with log.open("w") as out:
        others = subprocess.Popen([sys.executable, "-m", "dualmap", *words], stdout=out, env=unconfigured())
    try:
        wait_for(lambda: running.is_ready)
        wait_for(lambda: log.read_text().count("serves http") == 4)
        urls = [word for word in log.read_text().split() if word.startswith("http://")]
        revisions = {}
        for each in call(running.endpoint, "GET", "/admin/instances")["instances"]:
            call(running.endpoint, "PATCH", f"/admin/instances/{each['id']}", {"revision": "v1"})
            revisions[each["id"]] = "v1"
        for place, url in enumerate(urls[:4]):
            added = {"id": f"new-{place}", "url": url.rstrip(",;"), "revision": "v2"}
            call(running.endpoint, "POST", "/admin/instances", added)
            revisions[added["id"]] = "v2"
        wait_for(lambda: all(each["state"] == "ready" for each in listed(running.endpoint)))
        yield running, revisions
        running.stop()
    finally:
        others.kill()
        running.kill_all()


def listed(endpoint: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call(endpoint, "GET", "/admin/instances")["instances"]
    return found


def wait_for(condition: Any, within_s: float = 120.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the fleet is not ready")
        time.sleep(0.1)


def call(endpoint: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(endpoint + path, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


async def weights(options: Namespace, endpoint: str, load: Load, *, changes: bool) -> None:
    """Three weights, each for a third of the time; or the first one alone."""
    await call_soon(endpoint, "PATCH", "/admin/revisions", {"weights": {"v1": 95, "v2": 5}})
    await asyncio.sleep(2)  # every replica has the weights then
    over = asyncio.Event()
    running = asyncio.create_task(load.run(over))
    for percent in (None, 10, 50):
        if percent is not None and changes:
            await call_soon(endpoint, "PATCH", "/admin/revisions", {"weights": {"v2": percent}})
        await asyncio.sleep(options.minutes * 60 / 3 / options.time_scale)
    over.set()
    await running


async def call_soon(endpoint: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    return await asyncio.to_thread(call, endpoint, method, path, body)


def hits_by_minute(seen: list[Seen]) -> dict[int, float]:
    """Cached shares of prompt tokens, in percent, of whole minutes."""
    prompt, cached = defaultdict[int, int](int), defaultdict[int, int](int)
    for each in seen:
        prompt[int(each.at_s // 60)] += each.prompt_tokens
        cached[int(each.at_s // 60)] += each.cached_tokens
    return {minute: 100 * cached[minute] / prompt[minute] for minute in sorted(prompt) if prompt[minute]}


def moved(seen: list[Seen], since_s: float) -> tuple[int, int]:
    """Sessions of which a turn since then was served by another revision than the one before it, and all that had such
    a turn. Without weights any instance serves any turn."""
    by_session = defaultdict[int, list[Seen]](list)
    for each in sorted(seen, key=lambda each: each.turn):
        if each.revision:
            by_session[each.session].append(each)
    pairs = [[(one, two) for one, two in pairwise(turns) if two.at_s >= since_s] for turns in by_session.values()]
    return sum(any(one.revision != two.revision for one, two in each) for each in pairs), sum(map(bool, pairs))


async def rollout(options: Namespace, endpoint: str, load: Load) -> None:
    """A rollout until it ends, or the time is over."""
    if options.errors:
        every = round(1 / options.errors)
        for each in (await call_soon(endpoint, "GET", "/admin/instances"))["instances"]:
            if each["revision"] == "v2":
                order = {"lie": "error_event", "every": every}
                await call_soon(each["url"], "POST", "/emulator/lie", order)
    if options.shadow:  # until then it serves nobody
        await call_soon(endpoint, "PATCH", "/admin/revisions", {"weights": {"v1": 100}})
    over = asyncio.Event()
    running = asyncio.create_task(load.run(over))
    await asyncio.sleep(120 / options.time_scale)
    load.weighed_s = load.now_s()
    await call_soon(endpoint, "POST", "/admin/rollout", {"revision": "v2", "shadow": options.shadow})
    shown, before = "", None
    while load.now_s() < options.minutes * 60:
        await asyncio.sleep(1)
        found = (await call_soon(endpoint, "GET", "/admin/rollout"))["rollout"]
        if found["why"] != shown:
            shown = found["why"]
            if before is not None and found["state"] != "rolled back":
                show_figures(before)
            print(
                f"{load.now_s():7.0f} s {len(load.seen):6} requests  {found['state']} {found['percent']:g} %: {shown}"
            )
        if found["state"] in ("done", "rolled back"):
            break
        before = found
    show_figures(found)
    over.set()
    await running


TURN_S = 120.0
"""Seconds of the engines, of a turn with a shadow or without."""


async def shadow(options: Namespace, endpoint: str, load: Load) -> None:
    """First tokens in turns without a shadow and with one."""
    await call_soon(endpoint, "PATCH", "/admin/revisions", {"weights": {"v1": 100}})
    over, began = asyncio.Event(), list[tuple[float, bool]]()
    running = asyncio.create_task(load.run(over))
    await asyncio.sleep(TURN_S / options.time_scale)  # the caches have the shared prompts then
    for number in range(2 * options.turns):
        copied = number % 4 in (1, 2)  # without, with, with, without
        wanted = {"revision": "v2" if copied else "", "percent": options.shadow}
        await call_soon(endpoint, "PUT", "/admin/revisions/shadow", wanted)
        await asyncio.sleep(1)  # every replica knows
        began.append((load.now_s(), copied))
        await asyncio.sleep(TURN_S / options.time_scale)
    ended_s = load.now_s()
    over.set()
    await running
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for (from_s, copied), (until_s, _) in zip(began, [*began[1:], (ended_s, False)], strict=True):
        times_s = sorted(each.ttft_s for each in load.seen if from_s <= each.at_s < until_s)
        found[copied].append((quantile(times_s, 0.5), quantile(times_s, 0.99)))
    for copied, turns in found.items():
        for place, name in enumerate(("P50", "P99")):
            each_ms = sorted(1000 * turn[place] for turn in turns)
            shown = " ".join(f"{one:.0f}" for one in each_ms)
            print(f"{'with' if copied else 'without'} copies: TTFT {name} {quantile(each_ms, 0.5):.0f} ms ({shown})")
    served = {"v1": 0, "v2": 0}
    for each in await asyncio.to_thread(listed, endpoint):
        served[each["revision"]] += await asyncio.to_thread(ended_at, each["url"])
    print(f"{len(load.seen)} requests, {served['v2']} copies to v2, {served['v1'] - len(load.seen)} to v1")


def ended_at(url: str) -> int:
    """Requests that an engine has ended."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("vllm:request_success_total"))


def show_figures(rollout: dict[str, Any]) -> None:
    """A step has shown this."""
    for each in rollout["judgements"]:
        print(f"          {each['standing']}: {each['text']}")
    for name, each in rollout["per_revision"].items():
        requests, hits = rollout["requests"][name], each["hits_percent"]
        found = "caches not warm yet" if hits is None else f"{hits:.1f} % hits"
        print(
            f"          {name}: {requests} requests, {found}, {each['differing']} of {each['compared']}"
            " compared answers differed"
        )


async def streams(options: Namespace, running: FleetProcess, over: asyncio.Event) -> tuple[int, int, int]:
    """Streams that were whole, were cut, and were on time, of as many clients that begin again and again."""
    slo_s = SLO_S / options.time_scale
    whole = cut = on_time = 0

    async def client(number: int, http: httpx.AsyncClient) -> None:
        nonlocal whole, cut, on_time
        rng = random.Random(number)
        while not over.is_set():
            asked = " ".join(rng.choices(_WORDS, k=200))
            messages = [{"role": "user", "content": f"{number} {rng.random()} {asked}"}]
            answer_options = {"max_tokens": options.tokens, "ignore_eos": True, "stream": True}
            body = {"model": running.model, "messages": messages, **answer_options}
            began_s, first_s, last = time.monotonic(), None, ""
            with contextlib.suppress(httpx.HTTPError):
                async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        first_s = first_s or time.monotonic()
                        last = line or last
            whole, cut = whole + (last == "data: [DONE]"), cut + (last != "data: [DONE]")
            on_time += first_s is not None and first_s - began_s <= slo_s

    limits = httpx.Limits(max_connections=options.streams)
    async with (
        httpx.AsyncClient(base_url=running.endpoint, timeout=120, limits=limits) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(options.streams):
            group.create_task(client(number, http))
            await asyncio.sleep(0.02)
    return whole, cut, on_time


RESTART = """
import json, os, time, urllib.request
url = os.environ["DUALMAP_URL"]
order = json.dumps({"revive_after_s": 1.0, "abruptly": True}).encode()
urllib.request.urlopen(urllib.request.Request(url + "/emulator/die", order), timeout=9).read()
time.sleep(1.5)
"""


async def upgrade(options: Namespace, running: FleetProcess, folder: Path) -> None:
    """Streams alone for a while, then during an upgrade of all instances."""
    restart = folder / "restart.py"
    restart.write_text(RESTART)
    for during in (False, True):
        over = asyncio.Event()
        load = asyncio.create_task(streams(options, running, over))
        await asyncio.sleep(15)
        began_s = time.monotonic()
        if during:
            words = ["instances", "upgrade", "v2", "--within", "2s", "--run", f"{sys.executable} {restart}"]
            words += ["--at-once", str(options.at_once), *(["--gate"] if options.gate else [])]
            command = [sys.executable, "-m", "dualmap", *words, "--url", running.endpoint]
            code = (await asyncio.to_thread(subprocess.run, command, env=unconfigured(), check=False)).returncode
            assert code == 0, f"the upgrade ended with {code}"
        else:
            await asyncio.sleep(30)
        over.set()
        whole, cut, on_time = await load
        print(
            f"{'upgrade' if during else 'before'}: {time.monotonic() - began_s:.0f} s, {whole} streams whole, {cut}"
            f" cut, {100 * on_time / max(1, whole + cut):.2f} % on time"
        )


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("weights", "rollout", "shadow", "upgrade"))
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of the engines")
    parser.add_argument("--minutes", type=float, default=18.0, help="of the engines")
    parser.add_argument("--slower", type=float, default=1.0, help="the new revision takes so many times as long")
    parser.add_argument("--errors", type=float, default=0.0, help="share of its streams that end in an error")
    parser.add_argument("--seed", type=int, default=0, help="of its answers; those of the others have 0")
    parser.add_argument("--shadow", type=float, default=0.0, help="percent of sessions that are copied to it")
    parser.add_argument("--time-scale", type=float, help="speed of the engines (10, of an upgrade 1)")
    parser.add_argument("--at-once", type=int, default=1, help="instances that are upgraded at a time")
    parser.add_argument("--gate", action="store_true", help="each of these is a rollout that the gate passes")
    parser.add_argument("--streams", type=int, default=200, help="streams at a time, of an upgrade")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each of these")
    parser.add_argument("--turns", type=int, default=10, help="turns with copies, and as many without, of a shadow")
    options = parser.parse_args()
    options.time_scale = options.time_scale or (1.0 if options.what == "upgrade" else 10.0)
    if options.what == "shadow":
        options.shadow = options.shadow or 10.0
    if options.what == "upgrade":
        size = ("--port", "0", "--replicas", "2", "--workers", "1", "--instances", "8")
        with tempfile.TemporaryDirectory() as folder:
            running = FleetProcess.start(Path(folder), (*size, "--time-scale", str(options.time_scale)))
            try:
                wait_for(lambda: running.is_ready)
                asyncio.run(upgrade(options, running, Path(folder)))
                running.stop()
            finally:
                running.kill_all()
        return
    runs = (False, True) if options.what == "weights" else (True,)
    hits: dict[bool, dict[int, float]] = {}
    for changes in runs:
        with (
            tempfile.TemporaryDirectory() as folder,
            fleet(Path(folder), options) as (running, revisions),
        ):
            load = Load(running.endpoint, running.model, options.rate, revisions, options.time_scale)
            if options.what == "shadow":
                asyncio.run(shadow(options, running.endpoint, load))
            elif options.what == "weights":
                asyncio.run(weights(options, running.endpoint, load, changes=changes))
            else:
                asyncio.run(rollout(options, running.endpoint, load))
        hits[changes] = hits_by_minute(load.seen)
        new = [each for each in load.seen if each.revision == "v2"]
        bad = [each for each in new if each.status != 200 or each.ttft_s > SLO_S]
        other, of = moved(load.seen, load.weighed_s)
        print(
            f"{'changed' if changes else 'left alone'}: {len(load.seen)} requests, {len(new)} by v2, {len(bad)} of them"
            f" late or failed; sessions moved: {other} of {of}"
        )
    if len(runs) > 1:
        lost = {minute: hits[False][minute] - each for minute, each in hits[True].items() if minute in hits[False]}
        print("hits by minute, left alone: ", " ".join(f"{each:.1f}" for each in hits[False].values()))
        print("hits by minute, changed:    ", " ".join(f"{each:.1f}" for each in hits[True].values()))
        print(f"most lost in a minute: {max(lost.values()):.1f} points")


if __name__ == "__main__":
    main()
