"""Figures of discovery in Kubernetes: how soon pods come and go, requests to pods that are not Ready, and the cost.

    python -m benchmarks.discovery soon --pods 50
    python -m benchmarks.discovery lives --events 10000
    python -m benchmarks.discovery many --pods 2000 --changes-per-s 50

The API server is an emulator over a socket (``tests/support/kubernetes_cluster.py``); the store is a private Valkey.

``soon`` and ``lives`` run a router and a worker as processes, and clients that send short requests without a pause
between them. A pod is a server of its own here, which notes when a request came, and stands for what the cluster says
of it: it answers whether it is Ready or not, so that a request that is sent to it in error is seen. ``soon`` makes one
pod Ready at a time and deletes it again, beside one that stays. ``lives`` makes pods Ready, not Ready, relabelled,
terminating, deleted and new at random, and cuts, expires and compacts the watch meanwhile. A request that comes at a
pod that does not serve is late by the time since it served last; one that comes at a pod that never served counts as
never.

``many`` runs discovery alone in this process, and measures its CPU, reads of the members included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import random
import resource
import time
from collections.abc import Iterator
from typing import Any, cast

from dualmap.runtime.clock import RealClock
from dualmap.runtime.discovery_settings import DiscoverySettings, KubernetesSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.pool import PoolStore
from dualmap.statestore.redis import RedisStore
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.context import PoolContext
from dualmap.workers.discovery.job import discovery_of
from dualmap.workers.loop import run_job
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.ops import serve_ops
from dualmap.workers.pool_reader import CachedPoolReader
from dualmap.workers.settings import WorkerSettings
from tests.support.kubernetes_cluster import PODS, Cluster, asgi
from tests.support.kubernetes_fleet import KubernetesFleet, kubernetes_fleet, until

CLIENTS = 8
REQUESTS_PER_S = 80.0
SETTLE_S = 3.0
BOUND_S = 1.0
ANSWER = b'{"id":"c","object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":"length"}]}'
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


def now_s() -> float:
    return time.monotonic()


# pods ------------------------------------------------------------------------------------------------------------
class Pod:
    """One name of a pod, with the server at its address, and the times between which it served."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.requests_s: list[float] = []
        self.served_s: list[tuple[float, float]] = []
        self.serves_since_s: float | None = None
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if (at := head.find(b"content-length:")) >= 0:
                    await reader.readexactly(int(head[at + 15 :].partition(b"\r\n")[0]))
                if head.startswith(b"post"):
                    self.requests_s.append(now_s())
                    body, status = ANSWER, b"200 OK"
                elif b"/v1/models" in head:
                    body, status = MODELS, b"200 OK"
                else:
                    body, status = b"", b"200 OK" if b"/health" in head else b"404 Not Found"
                kind = b"content-type: application/json\r\n"
                writer.write(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body))
        writer.close()

    def serves(self, is_so: bool) -> None:
        """Note that it serves from now on, or serves no more."""
        if is_so and self.serves_since_s is None:
            self.serves_since_s = now_s()
        elif not is_so and self.serves_since_s is not None:
            self.served_s.append((self.serves_since_s, now_s()))
            self.serves_since_s = None

    def late_s(self) -> Iterator[float]:
        """For each request that came while it did not serve, the time since it served last; ``inf`` where it never
        did."""
        spans = [*self.served_s, *([(self.serves_since_s, float("inf"))] if self.serves_since_s is not None else [])]
        at = -1
        for came_s in self.requests_s:
            while at + 1 < len(spans) and spans[at + 1][0] <= came_s:
                at += 1
            if at < 0:
                yield float("inf")
            elif came_s > spans[at][1]:
                yield came_s - spans[at][1]

    def first_after(self, moment_s: float) -> float | None:
        return next((came_s for came_s in self.requests_s if came_s >= moment_s), None)


# clients ---------------------------------------------------------------------------------------------------------
class Clients:
    """Clients that send without a pause, each prompt another one."""

    def __init__(self, fleet: KubernetesFleet) -> None:
        self._host, self._port = fleet.host, fleet.port
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self.statuses: dict[int, int] = {}

    async def __aenter__(self) -> Clients:
        self._tasks = [asyncio.create_task(self._send()) for _ in range(CLIENTS)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    while True:
                        await self._one(reader, writer)
                        await asyncio.sleep(CLIENTS / REQUESTS_PER_S)
                finally:
                    writer.close()
            await asyncio.sleep(0.05)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = b'{"model":"m","max_tokens":1,"prompt":"%d %b"}' % (next(self._numbers), b"word " * 200)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        )
        writer.write(head % len(body) + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = int(answer[9:12])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        length = int(answer[answer.index(b"content-length:") + 15 :].partition(b"\r\n")[0])
        await reader.readexactly(length)


# what happens ----------------------------------------------------------------------------------------------------
class Lives:
    """Pods whose lives are random."""

    def __init__(self, cluster: Cluster, pods: list[Pod], random_source: random.Random) -> None:
        self._cluster = cluster
        self._pods = pods
        self._random = random_source
        self.kinds: dict[str, int] = {}

    def put(self, pod: Pod, *, ready: bool = True, terminating: bool = False, labelled: bool = True) -> None:
        serves = ready and labelled and not terminating
        labels = {"app": "vllm"} if labelled else {}
        notes = {"dualmap/port": str(pod.port)}
        if not serves:
            pod.serves(False)
        self._cluster.put_pod(
            pod.name, ip="127.0.0.1", ready=ready, terminating=terminating, labels=labels, annotations=notes
        )
        if serves:
            pod.serves(True)

    def delete(self, pod: Pod) -> None:
        pod.serves(False)
        if pod.name in self._cluster.pods():
            self._cluster.delete(PODS, pod.name)

    def happen(self) -> None:
        """One random event."""
        pod, kind = self._random.choice(self._pods), self._random.choices(list(EVENTS), list(EVENTS.values()))[0]
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if kind == "ready":
            self.put(pod)
        elif kind == "not ready":
            self.put(pod, ready=False)
        elif kind == "label lost":
            self.put(pod, labelled=False)
        elif kind == "terminating":
            self.put(pod, terminating=True)
        elif kind == "deleted":
            self.delete(pod)
        elif kind == "recreated":
            self.delete(pod)
            self.put(pod)
        elif kind == "cut":
            self._cluster.cut()
        elif kind == "compacted":
            self._cluster.compact()
            self._cluster.cut()
        elif kind == "bookmark":
            self._cluster.bookmark()


EVENTS = {
    "ready": 40.0,
    "not ready": 14.0,
    "label lost": 8.0,
    "terminating": 10.0,
    "deleted": 12.0,
    "recreated": 12.0,
    "bookmark": 2.0,
    "cut": 0.2,
    "compacted": 0.2,
}
"""Random events with their weights. Failures of the watch are rare enough for it to be open most of the time: while it
is not, what happens cannot be known."""


async def lives(events: int, per_s: float, pods: int, seed: int) -> None:
    cluster, source = Cluster(RealClock()), random.Random(seed)
    made = [Pod(f"vllm-{number}") for number in range(pods)]
    for pod in made:
        await pod.listen()
    world = Lives(cluster, made, source)
    for pod in made[: pods // 2]:
        world.put(pod)
    async with kubernetes_fleet(cluster) as fleet, Clients(fleet) as clients:
        await asyncio.sleep(2 * SETTLE_S)
        begun_s = now_s()
        for number in range(events):
            world.happen()
            await asyncio.sleep(max(0.0, begun_s + (number + 1) / per_s - now_s()))
        await asyncio.sleep(SETTLE_S)
    late = sorted(each for pod in made for each in pod.late_s())
    never = sum(each == float("inf") for each in late)
    total = sum(len(pod.requests_s) for pod in made)
    beyond = [each for each in late if each > BOUND_S]
    print(f"{events} events on {pods} pods in {now_s() - begun_s:.0f} s: {world.kinds}")
    print(f"{total} requests reached pods, answers by status {clients.statuses}")
    print(
        f"{len(late)} at a pod that did not serve: {never} that never served, {len(beyond)} later than {BOUND_S:g} s;"
        f" lateness P50 {_at(late, 0.5)}, P99 {_at(late, 0.99)}, most {_at(late, 1.0)}"
    )
    print(f"calls of the API: {len(cluster.calls)}, all of the worker")


def _at(values: list[float], share: float) -> str:
    return f"{values[min(len(values) - 1, int(share * len(values)))] * 1000:.0f} ms" if values else "none"


async def soon(pods: int, seed: int) -> None:
    cluster = Cluster(RealClock())
    made = [Pod(f"vllm-{number}") for number in range(pods + 1)]
    for pod in made:
        await pod.listen()
    world = Lives(cluster, made, random.Random(seed))
    stays, *others = made
    world.put(stays)
    firsts, lasts, lost = [], [], 0
    async with kubernetes_fleet(cluster) as fleet, Clients(fleet):
        await asyncio.sleep(2 * SETTLE_S)
        source = random.Random(seed)
        for pod in others:
            await asyncio.sleep(source.uniform(0, 0.5))
            world.put(pod, ready=False)
            await asyncio.sleep(source.uniform(0.5, 1.0))
            began_s = now_s()
            world.put(pod)
            await asyncio.sleep(SETTLE_S)
            first_s = pod.first_after(began_s)
            lost += first_s is None
            firsts.append((first_s or float("inf")) - began_s)
            ended_s = now_s()
            world.delete(pod)
            await asyncio.sleep(SETTLE_S / 2)
            lasts.append(max([came_s - ended_s for came_s in pod.requests_s if came_s > ended_s], default=0.0))
    firsts.sort()
    lasts.sort()
    print(f"{len(firsts)} pods, {lost} of them without a request in {SETTLE_S:g} s")
    print(f"Ready to first request: P50 {_at(firsts, 0.5)}, P90 {_at(firsts, 0.9)}, most {_at(firsts, 1.0)}")
    print(f"deleted to last request: P50 {_at(lasts, 0.5)}, P90 {_at(lasts, 0.9)}, most {_at(lasts, 1.0)}")


# many pods -------------------------------------------------------------------------------------------------------
def serve_many(pods: int, per_s: float, port: Any) -> None:
    """The process of the API server, which changes pods."""
    asyncio.run(_serve_many(pods, per_s, port))


async def _serve_many(pods: int, per_s: float, port: Any) -> None:
    cluster, source = Cluster(RealClock()), random.Random(1)
    padding = {f"example.com/note-{number}": "x" * 200 for number in range(10)}  # a pod is several kilobytes

    def put(number: int, ready: bool) -> None:
        ip = f"10.{number // 65536}.{number // 256 % 256}.{number % 256}"
        cluster.put_pod(f"vllm-{number}", ip=ip, ready=ready, annotations=padding)

    for number in range(pods):
        put(number, True)
    async with serve_ops(cast(Any, asgi(cluster)), "127.0.0.1", 0) as served:
        port.value = served
        is_ready = [True] * pods
        while port.value != -2:
            await asyncio.sleep(1 / per_s)
            if port.value == -1:
                number = source.randrange(pods)
                is_ready[number] = not is_ready[number]
                put(number, is_ready[number])
        cluster.close()


async def many(pods: int, per_s: float, for_s: float) -> None:
    port = multiprocessing.Value("i", 0)
    api = multiprocessing.Process(target=serve_many, args=(pods, per_s, port), daemon=True)
    api.start()
    with EmbeddedValkey() as valkey:
        await until(lambda: _is_set(port), "the API server listens")
        kubernetes = KubernetesSettings(
            label_selector="app=vllm", namespace="default", api_url=f"http://127.0.0.1:{port.value}"
        )
        store = RedisStore(StoreSettings(url=valkey.url), scheduling=SchedulingSettings())
        pool, clock, metrics = store.pool("default"), RealClock(), WorkerMetrics()
        lease = await pool.leader_lease.acquire("w", 600_000)
        assert lease is not None
        settings = PoolSettings(discovery=DiscoverySettings(kubernetes=kubernetes))
        reader = CachedPoolReader(pool, clock, 0.4)
        begun_s, cpu_s = now_s(), _cpu_s()
        context = PoolContext(
            pool=pool, settings=settings, worker=WorkerSettings(), worker_id="w", clock=clock, metrics=metrics,
            jitter=random.Random(1),
        ).leading(lease.fence, reader)  # fmt: skip
        async with discovery_of(context, kubernetes, members_age_s=2.0) as discovery:
            job = asyncio.create_task(run_job(discovery, context))
            await until(lambda: _serve(pool, pods), "all pods are members")
            listed_s = now_s() - begun_s
            assert len((await pool.membership()).instances) == pods
            print(f"{pods} pods are members {listed_s:.2f} s after the start, {_cpu_s() - cpu_s:.2f} s of CPU")
            for label, value in (("nothing changes", None), (f"{per_s:g} changes a second", -1)):
                await asyncio.sleep(SETTLE_S)
                if value is not None:
                    port.value = value
                began_s, cpu_s = now_s(), _cpu_s()
                await asyncio.sleep(for_s)
                share = (_cpu_s() - cpu_s) / (now_s() - began_s)
                print(f"{label}: {100 * share:.1f} % of a core")
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
        await store.close()
    port.value = -2
    api.join(5)
    api.kill()


async def _is_set(port: Any) -> bool:
    return bool(port.value)


async def _serve(pool: PoolStore, pods: int) -> bool:
    return (await pool.publications.discovery()).serving == pods


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("soon", "lives", "many"))
    parser.add_argument("--pods", type=int, default=40)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--events-per-s", type=float, default=25.0)
    parser.add_argument("--changes-per-s", type=float, default=50.0)
    parser.add_argument("--for-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.what == "soon":
        asyncio.run(soon(options.pods, options.seed))
    elif options.what == "lives":
        asyncio.run(lives(options.events, options.events_per_s, options.pods, options.seed))
    else:
        asyncio.run(many(options.pods, options.changes_per_s, options.for_s))


if __name__ == "__main__":
    main()
