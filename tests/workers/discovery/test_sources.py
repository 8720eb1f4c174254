"""Pods that an InferencePool or a Service names."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.state.instance import InstanceSpec
from tests.support.kubernetes_cluster import PODS, POOLS, SERVICES, SLICES, Refusal
from tests.workers.discovery.discovered_pool import DiscoveredPool


def put_pool(fleet: DiscoveredPool, app: str, *ports: int) -> None:
    spec = {
        "selector": {"matchLabels": {"app": app}},
        "targetPorts": [{"number": port} for port in ports],
        "endpointPickerRef": {"name": "picker"},
    }
    fleet.cluster.put(POOLS, "llama", spec=spec)


async def urls(fleet: DiscoveredPool) -> dict[str, str]:
    return {name: spec.url for name, spec in (await fleet.instances()).items()}


async def test_an_inference_pool_gives_selector_and_ports() -> None:
    async with DiscoveredPool(inference_pool="llama") as fleet:
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.1")
        put_pool(fleet, "vllm", 8000, 8001)
        await fleet.rounds()

        assert await urls(fleet) == {"vllm-0:8000": "http://10.0.0.1:8000", "vllm-0:8001": "http://10.0.0.1:8001"}


async def test_a_port_that_is_configured_wins_over_that_of_the_inference_pool() -> None:
    async with DiscoveredPool(inference_pool="llama", port=9000) as fleet:
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.1")
        put_pool(fleet, "vllm", 8000)
        await fleet.rounds()

        assert await urls(fleet) == {"vllm-0": "http://10.0.0.1:9000"}


async def test_pods_of_another_selector_take_the_place_of_the_former_ones() -> None:
    async with DiscoveredPool(inference_pool="llama") as fleet:
        fleet.cluster.put_pod("old", ip="10.0.0.1", labels={"app": "v1"})
        fleet.cluster.put_pod("new", ip="10.0.0.2", labels={"app": "v2"})
        put_pool(fleet, "v1", 80)
        await fleet.rounds()
        assert await urls(fleet) == {"old": "http://10.0.0.1:80"}
        put_pool(fleet, "v2", 80)
        await fleet.rounds(8)

        assert await urls(fleet) == {"new": "http://10.0.0.2:80"}


async def test_an_inference_pool_that_is_gone_is_reported_and_its_pods_stay() -> None:
    async with DiscoveredPool(inference_pool="llama") as fleet:
        await fleet.rounds()
        assert "there is no InferencePool llama" in (await fleet.status()).detail
        fleet.cluster.put_pod("vllm-0")
        put_pool(fleet, "vllm", 8000)
        await fleet.rounds()
        assert (await fleet.status()).state == "watching"
        fleet.cluster.delete(POOLS, "llama")
        await fleet.rounds()

        assert (await urls(fleet)).keys() == {"vllm-0"}
        assert (await fleet.status()).state == "failing"


def endpoint(name: str, ip: str, **conditions: bool) -> dict[str, Any]:
    return {
        "addresses": [ip],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name, "uid": f"uid-of-{name}"},
    }


async def test_a_service_names_its_pods_by_endpoint_slices() -> None:
    async with DiscoveredPool(service="vllm") as fleet:
        labels = {"labels": {"kubernetes.io/service-name": "vllm"}}
        ports = [{"name": "http", "port": 8080}]
        one, two = endpoint("a", "10.0.0.1", ready=True), endpoint("b", "10.0.0.2", ready=False)
        fleet.cluster.put(SLICES, "s1", metadata=labels, ports=ports, endpoints=[one, two])
        fleet.cluster.put(SLICES, "other", metadata={"labels": {}}, ports=ports, endpoints=[endpoint("x", "10.0.0.9")])
        await fleet.rounds()
        assert await urls(fleet) == {"a": "http://10.0.0.1:8080"}

        moved = endpoint("a", "10.0.0.1", ready=True)
        fleet.cluster.put(SLICES, "s2", metadata=labels, ports=ports, endpoints=[moved])
        fleet.cluster.delete(SLICES, "s1")
        await fleet.rounds()
        assert await urls(fleet) == {"a": "http://10.0.0.1:8080"}

        ending = endpoint("a", "10.0.0.1", ready=False, serving=True, terminating=True)
        fleet.cluster.put(SLICES, "s2", metadata=labels, ports=ports, endpoints=[ending])
        await fleet.rounds()
        assert await urls(fleet) == {}


def put_service(fleet: DiscoveredPool, *endpoints: dict[str, Any], selector: dict[str, str] | None = None) -> None:
    labels = {"labels": {"kubernetes.io/service-name": "vllm"}}
    fleet.cluster.put(SLICES, "s1", metadata=labels, ports=[{"port": 8080}], endpoints=list(endpoints))
    fleet.cluster.put(SERVICES, "vllm", spec={"selector": selector} if selector else {})


def put_labelled_pod(fleet: DiscoveredPool, name: str, ip: str, role: str) -> dict[str, Any]:
    """The pod's endpoint."""
    pod = fleet.cluster.put_pod(name, ip=ip, labels={"app": "vllm", "llm-d.ai/role": role})
    target = {"kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}
    return {**endpoint(name, ip, ready=True), "targetRef": target}


async def test_labels_of_pods_behind_a_service_count_where_they_may_be_read() -> None:
    async with DiscoveredPool(service="vllm") as fleet:
        one = put_labelled_pod(fleet, "a", "10.0.0.1", "prefill")
        put_service(fleet, one, selector={"app": "vllm"})
        await fleet.rounds(6)
        assert {name: spec.role.value for name, spec in (await fleet.instances()).items()} == {"a": "prefill"}

        put_labelled_pod(fleet, "a", "10.0.0.1", "decode")
        await fleet.rounds()
        assert {name: spec.role.value for name, spec in (await fleet.instances()).items()} == {"a": "decode"}
        assert (await fleet.status()).state == "watching"


@pytest.mark.parametrize("refused", [SERVICES, PODS])
async def test_without_the_right_to_read_labels_pods_of_a_service_are_mixed_and_that_is_reported(refused: str) -> None:
    fleet = DiscoveredPool(service="vllm")
    fleet.cluster.refuse = lambda call: Refusal(403) if call.path == refused else None
    async with fleet:
        one = put_labelled_pod(fleet, "a", "10.0.0.1", "prefill")
        put_service(fleet, one, selector={"app": "vllm"})
        await fleet.rounds(6)

        assert {name: spec.role.value for name, spec in (await fleet.instances()).items()} == {"a": "mixed"}
        status = await fleet.status()
        assert status.state == "watching" and "403" in status.left_out[0]


async def test_a_pod_whose_labels_have_not_come_is_not_entered_in_a_wrong_role() -> None:
    async with DiscoveredPool(service="vllm") as fleet:
        put_service(fleet, endpoint("a", "10.0.0.1", ready=True), selector={"app": "vllm"})
        await fleet.rounds(6)
        assert await urls(fleet) == {}

        put_service(fleet, put_labelled_pod(fleet, "a", "10.0.0.1", "prefill"), selector={"app": "vllm"})
        await fleet.rounds()
        assert (await urls(fleet)).keys() == {"a"}


async def test_pods_of_a_service_without_a_selector_are_taken_without_labels() -> None:
    async with DiscoveredPool(service="vllm") as fleet:
        put_service(fleet, endpoint("a", "10.0.0.1", ready=True))
        await fleet.rounds(6)

        assert (await urls(fleet)).keys() == {"a"}
        assert not (await fleet.status()).left_out


async def test_a_member_that_discovery_entered_is_taken_over_by_an_operator_who_enters_it() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        await fleet.rounds()
        await fleet.pool.members.put_instance(InstanceSpec("vllm-0", "http://10.0.0.1:8000"))
        fleet.cluster.put_pod("vllm-0", terminating=True)
        await fleet.rounds()

        assert (await urls(fleet)).keys() == {"vllm-0"}
