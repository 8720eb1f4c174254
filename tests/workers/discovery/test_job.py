"""The members of a pool are the pods that serve, whatever happens to the pods and to what is heard of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.statestore.errors import LeaseLostError
from tests.support.kubernetes_cluster import PODS, Cluster, Refusal
from tests.workers.discovery.discovered_pool import DiscoveredPool


async def test_a_pod_that_is_ready_is_entered_and_starts_by_a_health_check() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.1")
        fleet.cluster.put_pod("vllm-1", ip="10.0.0.2", ready=False)
        fleet.cluster.put_pod("other", ip="10.0.0.3", labels={"app": "other"})

        await fleet.round()

        (spec,) = (await fleet.instances()).values()
        assert (spec.instance_id, spec.url, spec.state) == ("vllm-0", "http://10.0.0.1:8000", InstanceState.STARTING)
        fleet.cluster.put_pod("vllm-1", ip="10.0.0.2")
        await fleet.round()
        assert (await fleet.states()).keys() == {"vllm-0", "vllm-1"}


@pytest.mark.parametrize("change", ["terminating", "not ready", "label", "deleted"])
async def test_a_pod_that_serves_no_more_drains_and_is_removed_once_it_is_empty(change: str) -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        await fleet.make_ready()
        if change == "terminating":
            fleet.cluster.put_pod("vllm-0", terminating=True)
        elif change == "not ready":
            fleet.cluster.put_pod("vllm-0", ready=False)
        elif change == "label":
            fleet.cluster.put_pod("vllm-0", labels={"app": "other"})
        else:
            fleet.cluster.delete(PODS, "vllm-0")

        await fleet.round()
        assert (await fleet.states()).get("vllm-0") in ("draining", "standby")
        await fleet.rounds(2)
        assert await fleet.instances() == {}


async def test_a_pod_that_comes_and_goes_at_once_is_drained_though_the_members_that_are_read_are_older() -> None:
    async with DiscoveredPool(members_age_s=5.0) as fleet:
        await fleet.round()
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        assert await fleet.states() == {"vllm-0": "starting"}
        fleet.cluster.put_pod("vllm-0", ready=False)
        await fleet.round(drains=False)
        assert await fleet.states() == {"vllm-0": "standby"}  # it has never served: nothing has to drain
        fleet.cluster.put_pod("vllm-0")
        await fleet.round(drains=False)
        assert await fleet.states() == {"vllm-0": "starting"}


async def test_a_pod_that_is_ready_again_while_it_drains_is_resumed() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        await fleet.make_ready()
        fleet.cluster.put_pod("vllm-0", ready=False)
        await fleet.round(drains=False)
        assert await fleet.states() == {"vllm-0": "draining"}

        fleet.cluster.put_pod("vllm-0", ready=True)
        await fleet.round(drains=False)

        assert await fleet.states() == {"vllm-0": "ready"}
        assert "leaving" not in ((await fleet.instances())["vllm-0"].origin or {})


async def test_another_pod_of_the_same_name_replaces_the_former_one_in_place() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.1")
        await fleet.round()
        await fleet.make_ready()
        fleet.cluster.is_silent = True  # nothing is heard until both have happened
        fleet.cluster.delete(PODS, "vllm-0")
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.9")
        fleet.cluster.is_silent = False
        await fleet.rounds(100, after_s=5)

        (spec,) = (await fleet.instances()).values()
        assert (spec.url, spec.state) == ("http://10.0.0.9:8000", InstanceState.STARTING)
        assert spec.origin == {"uid": "uid-2", "role": "mixed"}


async def test_instances_that_were_entered_by_hand_are_never_touched() -> None:
    async with DiscoveredPool() as fleet:
        by_hand = [InstanceSpec("vllm-0", "http://elsewhere:1"), InstanceSpec("mine", "http://10.0.0.2:8000")]
        for spec in by_hand:
            await fleet.pool.members.put_instance(spec)
        fleet.cluster.put_pod("vllm-0", ip="10.0.0.1")
        fleet.cluster.put_pod("vllm-1", ip="10.0.0.2")
        await fleet.round()
        fleet.cluster.delete(PODS, "vllm-0")
        await fleet.rounds()

        assert list((await fleet.instances()).values()) == sorted(by_hand, key=lambda spec: spec.instance_id)
        assert (await fleet.status()).left_out == (
            "vllm-1: http://10.0.0.2:8000 is in the fleet as mine, which discovery did not enter",
        )


async def test_an_instance_that_an_operator_drained_stays_out_until_its_pod_goes() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        await fleet.make_ready()
        await fleet.pool.members.set_instance_state("vllm-0", InstanceState.DRAINING)
        await fleet.rounds()
        fleet.cluster.put_pod("vllm-0", ready=False)
        await fleet.rounds()
        fleet.cluster.put_pod("vllm-0", ready=True)
        await fleet.rounds()
        assert await fleet.states() == {"vllm-0": "standby"}

        fleet.cluster.put_pod("vllm-0", terminating=True)
        await fleet.rounds()
        assert await fleet.instances() == {}


async def test_aliases_of_a_pod_are_noted_and_follow_its_annotation() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0", annotations={"dualmap/aliases": "gpt-4o,chat"})
        await fleet.round()
        assert (await fleet.instances())["vllm-0"].aliases == ("gpt-4o", "chat")

        fleet.cluster.put_pod("vllm-0", annotations={"dualmap/aliases": "chat"})
        await fleet.round()
        assert (await fleet.instances())["vllm-0"].aliases == ("chat",)
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        assert (await fleet.instances())["vllm-0"].aliases == ()


async def test_a_role_that_the_leader_moved_stays_until_the_label_changes() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0", labels={"app": "vllm", "llm-d.ai/role": "prefill"})
        await fleet.round()
        await fleet.pool.members.update_instance("vllm-0", {"role": "decode"})
        await fleet.rounds()
        assert (await fleet.instances())["vllm-0"].role == "decode"

        fleet.cluster.put_pod("vllm-0", labels={"app": "vllm", "llm-d.ai/role": "both"})
        await fleet.rounds()
        assert (await fleet.instances())["vllm-0"].role == "mixed"


FAILURES = {
    "403": Refusal(403, b'{"message": "pods is forbidden"}'),
    "429": Refusal(429, b'{"message": "too many requests"}', {"retry-after": "20"}),
    "500": Refusal(500, b"oops"),
    "garbage": Refusal(200, b"<html>a proxy</html>"),
    "no list": Refusal(200, b'{"items": 7}'),
    "half a pod": Refusal(
        200, b'{"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": "x", "uid": 3}}]}'
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_hour_of_failures_changes_no_member_and_is_reported(failure: str) -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        await fleet.round()
        before = await fleet.instances()
        fleet.cluster.refuse = lambda _: FAILURES[failure]
        fleet.cluster.cut()
        calls = len(fleet.cluster.calls)
        await fleet.rounds(60, after_s=60)

        assert await fleet.instances() == before
        status = await fleet.status()
        assert (status.state, status.pods, bool(status.detail)) == ("failing", 1, True)
        assert len(fleet.cluster.calls) - calls < 200  # with growing pauses
        fleet.cluster.refuse = lambda _: None
        fleet.cluster.put_pod("vllm-1", ip="10.0.0.2")
        await fleet.rounds(3, after_s=31)
        assert (await fleet.instances()).keys() == {"vllm-0", "vllm-1"}
        assert (await fleet.status()).state == "watching"


async def test_a_refusal_names_the_right_that_is_missing() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.refuse = lambda _: FAILURES["403"]
        await fleet.rounds(2, after_s=60)

        status = await fleet.status()
        assert status.state == "failing"
        assert "pods is forbidden" in status.detail and "Role with this right" in status.detail


async def test_without_the_right_to_watch_the_pods_are_listed_at_intervals() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.refuse = lambda call: FAILURES["403"] if call.is_watch else None
        await fleet.rounds(3, after_s=30)
        fleet.cluster.put_pod("vllm-0")
        await fleet.rounds(3, after_s=30)

        assert (await fleet.instances()).keys() == {"vllm-0"}
        assert (await fleet.status()).state == "failing"


async def test_the_next_leader_lists_again_and_drops_what_went_meanwhile() -> None:
    async with DiscoveredPool() as fleet:
        for number in range(3):
            fleet.cluster.put_pod(f"vllm-{number}", ip=f"10.0.0.{number}")
        await fleet.round()
        await fleet.end_term()
        fleet.cluster.delete(PODS, "vllm-1")
        await fleet.lead()
        await fleet.rounds()

        assert (await fleet.instances()).keys() == {"vllm-0", "vllm-2"}


async def test_a_former_leader_cannot_enter_what_it_found() -> None:
    async with DiscoveredPool() as fleet:
        fleet.cluster.put_pod("vllm-0")
        assert fleet.lease is not None
        await fleet.pool.leader_lease.release(fleet.lease)
        assert await fleet.pool.leader_lease.acquire("another", 10**9) is not None

        with pytest.raises(LeaseLostError):
            await fleet.round()
        assert await fleet.instances() == {}


def test_after_random_lives_of_pods_and_failures_of_the_watch_the_members_are_the_pods_that_serve() -> None:
    seen: set[str] = set()

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.integers(0, 11)), min_size=20, max_size=40))
    def lives(events: list[tuple[str, int]]) -> None:
        seen.update(name for name, _ in events)
        asyncio.run(_live_through(events))

    lives()
    assert len(seen) > 10


async def _live_through(events: list[tuple[str, int]]) -> None:
    async with DiscoveredPool() as fleet:
        by_hand = InstanceSpec("by-hand", "http://hand:1")
        await fleet.pool.members.put_instance(by_hand)
        for name, number in events:
            happens = EVENTS[name](fleet, number)
            if happens is not None:
                await happens
            assert (await fleet.instances())["by-hand"] == by_hand
        cluster = fleet.cluster
        cluster.is_silent, cluster.refuse = False, lambda _: None
        await fleet.rounds(2, after_s=65)  # a dead watch and the longest pause, but no list that is due anyhow
        await fleet.rounds(6)

        serving = {name: (uid, f"http://{ip}:8000") for name, uid, ip in _serving(cluster)}
        members = {name: spec for name, spec in (await fleet.instances()).items() if name != "by-hand"}
        assert {name: (spec.origin["uid"], spec.url) for name, spec in members.items()} == serving
        assert all("leaving" not in spec.origin for spec in members.values())
        assert (await fleet.status()).state == "watching"


def _serving(cluster: Cluster) -> list[tuple[str, str, str]]:
    return [
        (name, pod["metadata"]["uid"], pod["status"]["podIP"])
        for name, pod in cluster.pods().items()
        if pod["metadata"]["labels"].get("app") == "vllm"
        and "deletionTimestamp" not in pod["metadata"]
        and pod["status"]["conditions"][0]["status"] == "True"
    ]


def pod_name(number: int) -> str:
    return f"vllm-{number % 3}"


def put(fleet: DiscoveredPool, number: int, **how: Any) -> None:
    """A pod by its number, with an address of its own from its beginning to its end."""
    name = pod_name(number)
    pod = fleet.cluster.pods().get(name)
    ip = f"10.0.{number}.{len(fleet.cluster.log)}" if pod is None else pod["status"]["podIP"]
    fleet.cluster.put_pod(name, ip=ip, **how)


def delete(fleet: DiscoveredPool, number: int) -> None:
    if pod_name(number) in fleet.cluster.pods():
        fleet.cluster.delete(PODS, pod_name(number))


def recreate(fleet: DiscoveredPool, number: int) -> None:
    delete(fleet, number)
    put(fleet, number)


def compact(fleet: DiscoveredPool, number: int) -> None:
    fleet.cluster.expires_by_status = number % 2 == 0
    fleet.cluster.compact()
    if number % 3 > 1:
        fleet.cluster.cut()


def refuse(fleet: DiscoveredPool, number: int) -> None:
    refusal = FAILURES[sorted(FAILURES)[number % len(FAILURES)]]
    fleet.cluster.refuse = lambda call: refusal if call.is_watch or number >= len(FAILURES) else None


SAID = (
    b'{"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}\n',
    b'{"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "etcdserver: request timed out"}}\n',
    b'{"type": "ERROR", "object": {}}\n',
    b'{"type": "ADDED", "object": {"metadata": {"name": "half"}}}\n',
    b"<html>a proxy</html>\n",
    b'{"type": "BOOKMARK", "object": {"metadata": {}}}\n',
)


def say(fleet: DiscoveredPool, number: int) -> None:
    fleet.cluster.say(SAID[number % len(SAID)])


def accept(fleet: DiscoveredPool, _: int) -> None:
    fleet.cluster.refuse = lambda _: None


def be_silent(fleet: DiscoveredPool, number: int) -> None:
    fleet.cluster.is_silent = number % 3 > 0


async def change_leader(fleet: DiscoveredPool, _: int) -> None:
    await fleet.end_term()
    await fleet.lead()


EVENTS: dict[str, Callable[[DiscoveredPool, int], Awaitable[None] | None]] = {
    "ready": put,
    "not ready": lambda fleet, number: put(fleet, number, ready=False),
    "label lost": lambda fleet, number: put(fleet, number, labels={}),
    "terminating": lambda fleet, number: put(fleet, number, terminating=True),
    "deleted": delete,
    "recreated": recreate,
    "health checks": lambda fleet, _: fleet.make_ready(),
    "round": lambda fleet, number: fleet.round(after_s=(0.25, 5.0, 70.0)[number % 3]),
    "connections cut": lambda fleet, _: fleet.cluster.cut(),
    "compacted": compact,
    "bookmark": lambda fleet, _: fleet.cluster.bookmark(),
    "silence": be_silent,
    "said": say,
    "refusals": refuse,
    "no refusals": accept,
    "another leader": change_leader,
}
"""Each happens to a pod by its number, or to the API server."""
