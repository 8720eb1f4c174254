"""A pool without instances, with real processes: the first requests wait, one engine starts, and goes again."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from dualmap.runtime.clock import RealClock
from tests.support.kubernetes_cluster import Cluster
from tests.support.kubernetes_fleet import EngineWorkload, KubernetesFleet, kubernetes_fleet, until

WORKLOAD = "deployment/vllm"
CLIENTS = 20
BODY = b'{"model": "m", "prompt": "hello", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: fleet\r\ncontent-type: application/json\r\nconnection: close\r\n"


async def answered(fleet: KubernetesFleet) -> tuple[int, float]:
    """The status of a request, and when it came."""
    reader, writer = await asyncio.open_connection(fleet.host, fleet.port)
    writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (HEAD, len(BODY), BODY))
    status = int((await reader.readuntil(b"\r\n")).split()[1])
    at_s = time.monotonic()
    await reader.read()
    writer.close()
    return status, at_s


async def test_the_first_requests_wait_for_an_engine_that_is_started_for_them_and_goes_again() -> None:
    cluster = Cluster(RealClock())
    workload = EngineWorkload(cluster, WORKLOAD, start_s=1.0)
    autoscale = {"min_instances": 0, "max_instances": 1, "idle_s": 2.0, "actuator": "kubernetes", "workload": WORKLOAD}
    try:
        async with kubernetes_fleet(cluster, autoscale=autoscale) as fleet, asyncio.timeout(120):
            answers = await asyncio.gather(*(answered(fleet) for _ in range(CLIENTS)))
            assert Counter(status for status, _ in answers) == {200: CLIENTS}
            assert min(at_s for _, at_s in answers) > workload.ready_s[0], "none is answered before an engine is ready"
            assert workload.sets == [1]

            async def is_asleep() -> bool:
                return workload.replicas == 0 and not workload.pods()

            await until(is_asleep, "the pool returns to none")
            status, _ = await answered(fleet)
            assert (status, workload.sets) == (200, [1, 0, 1])
    finally:
        workload.close()
