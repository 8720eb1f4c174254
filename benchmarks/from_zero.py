"""Scale from zero: clients that find no instance, and how soon they are answered once the first one is ready.

    python -m benchmarks.from_zero --clients 200 --start-s 20

A router and a worker are processes with a private Valkey. The worker scales a Deployment of an emulated API server
(``tests/support/kubernetes_cluster.py``) from none to one; its pod is an emulated engine, a process of its own, that
becomes Ready so long after it was made. Each client sends one streamed request, all of them in the first seconds. Times
are from the moment at which the cluster says Ready. Then no request comes, until the last instance is gone again.
With ``--decode`` the instance prefills, and a StatefulSet for decode instances is scaled from none to one beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dualmap.runtime.clock import RealClock
from tests.support.kubernetes_cluster import Cluster
from tests.support.kubernetes_fleet import EngineWorkload, KubernetesFleet, kubernetes_fleet, until

SPREAD_S = 2.0
"""Time in which the clients come."""
LONGEST_S = 300.0


@dataclass
class Answers:
    statuses: Counter[int] = field(default_factory=Counter)
    first_bytes_s: list[float] = field(default_factory=list)
    whole: int = 0


async def client(fleet: KubernetesFleet, number: int, answers: Answers, *, after_s: float = 0.0) -> None:
    """One streamed request, with its first byte of the answer noted."""
    await asyncio.sleep(after_s)
    prompt = f"client {number}: " + "word " * 100
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 8, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(fleet.host, fleet.port, limit=2**20)
    head = "POST /v1/completions HTTP/1.1\r\nhost: fleet\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    await reader.readuntil(b"\r\n\r\n")
    text = await reader.read(1)
    answers.statuses[status] += 1
    if status == 200:
        answers.first_bytes_s.append(time.monotonic())
        text += await reader.read()
        answers.whole += b"[DONE]" in text
    writer.close()


async def run(
    clients: int, start_s: float, idle_s: float, *, decode: bool
) -> tuple[Answers, list[EngineWorkload], float]:
    """Returns the answers, the workloads, and the time from the last answer until no replica was wanted any more."""
    cluster = Cluster(RealClock())
    workloads = [EngineWorkload(cluster, "deployment/vllm", start_s=start_s, role="prefill" if decode else "")]
    if decode:
        workloads.append(EngineWorkload(cluster, "statefulset/decode", start_s=start_s, role="decode"))
    autoscale: dict[str, Any] = {
        "min_instances": 0,
        "max_instances": 1,
        "start_s": max(30.0, start_s),
        "idle_s": idle_s,
        "actuator": "kubernetes",
        "workload": "deployment/vllm",
    }
    if decode:
        autoscale["decode"] = {"min_instances": 0, "max_instances": 1, "workload": "statefulset/decode"}
    answers = Answers()
    try:
        async with kubernetes_fleet(cluster, autoscale=autoscale) as fleet, asyncio.timeout(LONGEST_S):
            await asyncio.gather(
                *(client(fleet, each, answers, after_s=SPREAD_S * each / clients) for each in range(clients))
            )
            answered_s = time.monotonic()

            async def is_asleep() -> bool:
                return all(workload.replicas == 0 for workload in workloads)

            await until(is_asleep, "the pool returns to none", idle_s + 60)
            return answers, workloads, time.monotonic() - answered_s
    finally:
        for workload in workloads:
            workload.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--start-s", type=float, default=20.0)
    parser.add_argument("--idle-s", type=float, default=10.0)
    parser.add_argument("--decode", action="store_true", help="prefill and decode apart, both from zero")
    options = parser.parse_args()
    ran = run(options.clients, options.start_s, options.idle_s, decode=options.decode)
    answers, workloads, asleep_s = asyncio.run(ran)
    ready_s = min(workload.ready_s[0] for workload in workloads)
    after_s = sorted(each - ready_s for each in answers.first_bytes_s)
    print(f"{options.clients} clients: answers by status {dict(answers.statuses)}, {answers.whole} of them whole")
    print(
        f"first bytes after Ready: first {after_s[0] * 1000:.0f} ms, median {after_s[len(after_s) // 2] * 1000:.0f} ms,"
        f" last {after_s[-1] * 1000:.0f} ms; {sum(each <= 1.0 for each in after_s)} of them within 1 s"
    )
    for workload in workloads:
        print(f"replicas of {workload.name} as they were set: {workload.sets}")
    print(f"none {asleep_s:.0f} s after the last answer")


if __name__ == "__main__":
    main()
