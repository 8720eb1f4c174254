"""Replicas of a workload follow the decisions of the autoscaler: in a pool whose pods discovery enters and removes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.runtime.discovery_settings import DiscoverySettings, KubernetesSettings
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.scaling.scale_job import MAX_CALLS
from dualmap.scheduling.scaling.scale_plan import FleetFigures, Plan
from dualmap.scheduling.scaling.scale_record import DecisionStatus, ScaleRecord
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings, DecodeAutoscaleSettings
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.scaler import Scaler
from dualmap.workers.workload import DELETION_COST, LOWEST_COST, Workload
from tests.support.kubernetes_cluster import PODS, Call, ClusterTransport, Refusal, Scaled
from tests.workers.discovery.discovered_pool import DiscoveredPool

DEPLOYMENT, STATEFUL_SET, GROUPS = "deployment/vllm", "statefulset/vllm", "leaderworkerset/vllm"
SCALE = "/scale"
LWS = "leaderworkerset.x-k8s.io"


class HandPlan:
    """Wants what the test says; None: what is there."""

    def __init__(self) -> None:
        self.wanted: int | None = None

    def observe(self, now: FleetFigures) -> None:
        self.now = now

    def plan(self) -> Plan:
        return Plan(self.now.size if self.wanted is None else self.wanted, "as the test says")


class ScaledPool(DiscoveredPool):
    """A discovered pool whose workload the autoscaler scales by the plan of a test; with a decode workload, that one
    too."""

    def __init__(self, workload: str, replicas: int, decode_workload: str = "", **autoscale: Any) -> None:
        super().__init__()
        self.workload = Scaled(self.cluster, workload, replicas=replicas, role="prefill" if decode_workload else "")
        self.plan, self.decode_plan = HandPlan(), HandPlan()
        if decode_workload:
            self.decode_workload = Scaled(self.cluster, decode_workload, replicas=replicas, role="decode")
            least = autoscale.get("min_instances", 1)
            autoscale["decode"] = {"min_instances": least, "max_instances": 9, "workload": decode_workload}
        settings = AutoscaleSettings(
            **{"max_instances": 9, "actuator": "kubernetes", "workload": workload, "start_s": 100.0, **autoscale}
        )
        self._pool_settings = PoolSettings(
            autoscale=settings,
            discovery=DiscoverySettings(kubernetes=KubernetesSettings(label_selector="app=vllm")),
        )
        self.scalers: list[Scaler] = []

    async def __aenter__(self) -> ScaledPool:
        await super().__aenter__()
        self.new_leader()
        await self.pass_s(3)
        return self

    async def __aexit__(self, *error: object) -> None:
        for each in self.scalers:
            await each.close()
        await super().__aexit__(*error)

    def new_leader(self) -> None:
        """Scalers that know nothing but what is stored."""
        self.scalers.clear()
        for decodes, plan in ((False, self.plan), (True, self.decode_plan)):
            autoscale = self._pool_settings.autoscale_of(decodes=decodes)
            if autoscale is not None:
                api = KubernetesApi(
                    KubernetesSettings(label_selector="app=vllm", api_url="http://cluster", namespace="default"),
                    transport=ClusterTransport(self.cluster),
                )
                scaler = Scaler(
                    replace(self.leading, settings=self._pool_settings), SchedulingSettings(),
                    Workload(api, str(autoscale.workload), self.pool), arrived=lambda: 0, decodes=decodes,
                )  # fmt: skip
                scaler._keeper.planner = plan
                self.scalers.append(scaler)

    async def pass_s(self, seconds: int) -> ScaleRecord:
        """The rounds of so many seconds, health checks included."""
        for _ in range(seconds):
            await self.round(after_s=1.0)
            await self.make_ready()
            for each in self.scalers:
                await each.tick()
        return await self.pool.publications.scaling()

    async def log(self) -> str:
        return "; ".join(
            f"{line.event}: {line.text}" for line in reversed(await self.pool.publications.scaling_log(50))
        )


async def test_a_step_up_sets_the_replicas_once_and_is_done_when_the_pods_serve() -> None:
    async with ScaledPool(DEPLOYMENT, 1) as fleet:
        fleet.plan.wanted = 3
        record = await fleet.pass_s(6)

        assert fleet.workload.sets == [3]
        assert (record.status, record.decision_id) == (DecisionStatus.DONE, 1)
        assert len(await fleet.states()) == 3
        assert "accepted: deployment/vllm: 1 -> 3 replicas" in await fleet.log()


async def test_a_step_down_drains_the_planned_instance_and_removes_its_pod_and_no_other() -> None:
    async with ScaledPool(DEPLOYMENT, 3) as fleet:
        assert fleet.workload.pods() == ["vllm-x0", "vllm-x1", "vllm-x2"]
        fleet.plan.wanted = 2
        record = await fleet.pass_s(1)
        assert record.leaving == ("vllm-x0",)  # the controller would remove the newest one
        assert fleet.workload.sets == [], "it is drained before"
        record = await fleet.pass_s(3)

        assert fleet.workload.sets == [2]
        assert fleet.workload.pods() == ["vllm-x1", "vllm-x2"]
        fleet.workload.finish()
        record = await fleet.pass_s(3)
        assert record.status is DecisionStatus.DONE
        assert await fleet.states() == {"vllm-x1": "ready", "vllm-x2": "ready"}
        assert record.spares == ()


@pytest.mark.parametrize("workload", [STATEFUL_SET, GROUPS])
async def test_a_workload_that_numbers_its_pods_loses_the_highest_one(workload: str) -> None:
    async with ScaledPool(workload, 3) as fleet:
        fleet.plan.wanted = 2
        record = await fleet.pass_s(4)

        assert record.leaving == ("vllm-2",)
        assert (fleet.workload.sets, fleet.workload.pods()) == ([2], ["vllm-0", "vllm-1"])
        assert not [call for call in fleet.cluster.calls if call.method == "PATCH" and not call.path.endswith(SCALE)]


async def test_a_pod_above_that_an_operator_keeps_stops_the_removal_and_the_log_says_so() -> None:
    async with ScaledPool(STATEFUL_SET, 3) as fleet:
        await fleet.pool.members.set_instance_state("vllm-2", InstanceState.STANDBY)
        fleet.plan.wanted = 1
        record = await fleet.pass_s(8)

        assert record.leaving == ("vllm-1",)
        assert fleet.workload.sets == []
        assert record.is_open
        assert "highest number first" in await fleet.log()


async def test_a_hole_in_the_numbers_costs_no_pod_that_serves() -> None:
    async with ScaledPool(STATEFUL_SET, 4) as fleet:
        fleet.cluster.put_pod("vllm-1", ip="10.1.0.2", ready=False)  # crashes
        await fleet.pass_s(3)
        fleet.plan.wanted = 2
        await fleet.pass_s(5)

        assert fleet.workload.sets == [3]
        assert (await fleet.states()).keys() >= {"vllm-0", "vllm-2"}


FAILURES = {
    "conflict": Refusal(409, b'{"message": "modified"}'),
    "403": Refusal(403, b'{"message": "deployments/scale is forbidden"}'),
    "429": Refusal(429, b'{"message": "too many"}', {"retry-after": "7"}),
    "away": Refusal(503, b"no"),
    "garbage": Refusal(200, b"<html>"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("method", ["GET", "PATCH"])
async def test_what_fails_is_tried_again_and_nothing_is_done_twice(failure: str, method: str) -> None:
    async with ScaledPool(DEPLOYMENT, 1) as fleet:
        fleet.cluster.refuse = lambda call: (
            FAILURES[failure] if call.path.endswith(SCALE) and call.method == method else None
        )
        fleet.plan.wanted = 2
        record = await fleet.pass_s(5)
        assert record.is_open
        assert record.asked >= 1
        assert "refused: deployment/vllm" in await fleet.log()
        assert fleet.workload.sets == []

        fleet.cluster.refuse = lambda _: None
        record = await fleet.pass_s(20)
        assert fleet.workload.sets == [2]
        assert record.status is DecisionStatus.DONE


async def test_an_api_that_stays_away_ends_a_step_up_and_the_next_one_is_made_later() -> None:
    async with ScaledPool(DEPLOYMENT, 1) as fleet:
        fleet.cluster.refuse = lambda call: FAILURES["away"] if call.path.endswith(SCALE) else None
        fleet.plan.wanted = 2
        record = await fleet.pass_s(40)
        assert (record.status, record.asked) == (DecisionStatus.FAILED, MAX_CALLS)

        fleet.cluster.refuse = lambda _: None
        await fleet.pass_s(60)
        assert fleet.workload.sets == [2]


async def test_an_instance_that_has_drained_is_removed_once_the_api_is_back_however_long_that_takes() -> None:
    async with ScaledPool(DEPLOYMENT, 2) as fleet:
        fleet.cluster.refuse = lambda call: FAILURES["away"] if call.path.endswith(SCALE) else None
        fleet.plan.wanted = 1
        record = await fleet.pass_s(300)
        assert record.is_open
        assert record.decision_id == 1, "no further instance is drained meanwhile"
        assert MAX_CALLS < record.asked < 30

        fleet.cluster.refuse = lambda _: None
        record = await fleet.pass_s(40)
        assert fleet.workload.sets == [1]
        assert record.status is DecisionStatus.DONE


async def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_more_is_removed() -> None:
    async with ScaledPool(DEPLOYMENT, 3) as fleet:
        fleet.plan.wanted = 2
        await fleet.pass_s(2)
        changed = Scaled.scale

        def lose_answer(scaled: Scaled, replicas: int) -> None:
            changed(scaled, replicas)
            fleet.workload.finish()
            raise ConnectionError("reset")

        fleet.workload.scale = lose_answer.__get__(fleet.workload)
        await fleet.pass_s(1)
        record = await fleet.pass_s(20)

        assert fleet.workload.sets == [2]
        assert record.status is DecisionStatus.DONE


async def test_the_next_leader_does_nothing_twice() -> None:
    async with ScaledPool(DEPLOYMENT, 1) as fleet:
        fleet.workload.is_ready = False
        fleet.plan.wanted = 2
        await fleet.pass_s(3)
        assert fleet.workload.sets == [2]
        fleet.new_leader()
        await fleet.pass_s(5)
        assert fleet.workload.sets == [2]
        fleet.workload.make_ready()

        assert (await fleet.pass_s(4)).status is DecisionStatus.DONE


async def test_a_change_by_another_writer_is_a_conflict_and_is_read_again() -> None:
    async with ScaledPool(DEPLOYMENT, 1) as fleet:
        workload = fleet.workload

        def another_first(call: Any) -> None:
            if call.method == "PATCH" and not workload.sets:
                workload.scale(3)

        fleet.cluster.refuse = another_first
        fleet.plan.wanted = 2
        await fleet.pass_s(1)
        fleet.plan.wanted = None
        await fleet.pass_s(10)

        assert workload.sets == [3]  # as many as another one has set already
        assert "409" in await fleet.log()


async def test_a_deletion_cost_of_a_decision_that_was_withdrawn_is_taken_away() -> None:
    async with ScaledPool(DEPLOYMENT, 3) as fleet:
        notes = {"annotations": {DELETION_COST: LOWEST_COST}, "labels": {"app": "vllm"}}
        pod = fleet.cluster.pods()["vllm-x1"]
        fleet.cluster.put(PODS, "vllm-x1", metadata=notes, status=pod["status"])
        fleet.plan.wanted = 2
        await fleet.pass_s(5)

        assert fleet.workload.pods() == ["vllm-x1", "vllm-x2"]
        assert DELETION_COST not in fleet.cluster.pods()["vllm-x1"]["metadata"]["annotations"]


async def test_load_that_returns_before_the_pod_is_removed_brings_its_instance_back() -> None:
    async with ScaledPool(DEPLOYMENT, 2) as fleet:
        fleet.cluster.refuse = lambda call: FAILURES["away"] if call.path.endswith(SCALE) else None
        fleet.plan.wanted = 1
        await fleet.pass_s(10)
        assert sorted((await fleet.states()).values()) == ["ready", "standby"]
        fleet.plan.wanted = 2
        await fleet.pass_s(6)

        assert sorted((await fleet.states()).values()) == ["ready", "ready"]
        assert fleet.workload.sets == []


async def test_pods_that_an_operator_has_drained_are_replaced_and_instances_elsewhere_are_counted() -> None:
    async with ScaledPool(DEPLOYMENT, 2) as fleet:
        await fleet.pool.members.put_instance(InstanceSpec("by-hand", "http://hand:1", state=InstanceState.READY))
        await fleet.pool.members.set_instance_state("vllm-x0", InstanceState.STANDBY)
        await fleet.pass_s(1)
        fleet.plan.wanted = 3  # by-hand, vllm-x1, and one more
        await fleet.pass_s(6)

        assert fleet.workload.sets == [3]
        assert sum(state == "ready" for state in (await fleet.states()).values()) == 3


async def test_a_pod_with_another_instance_beside_the_one_that_leaves_stays() -> None:
    async with ScaledPool(DEPLOYMENT, 2) as fleet:
        for name in fleet.workload.pods():
            pod = fleet.cluster.pods()[name]
            notes = {"annotations": {"dualmap/port": "8000,8001"}, "labels": {"app": "vllm"}}
            fleet.cluster.put(PODS, name, metadata=notes, status=pod["status"])
        await fleet.pass_s(6)
        assert len([state for state in (await fleet.states()).values() if state == "ready"]) == 4
        fleet.plan.wanted = 3
        await fleet.pass_s(6)

        assert fleet.workload.sets == []
        assert "has the instance" in await fleet.log()


async def test_a_rollout_is_waited_for() -> None:
    async with ScaledPool(DEPLOYMENT, 2) as fleet:
        fleet.workload.add()  # a pod of the new version beside those of the old one
        await fleet.pass_s(3)
        fleet.plan.wanted = 2
        await fleet.pass_s(5)
        assert fleet.workload.sets == []
        assert "a rollout?" in await fleet.log()
        fleet.workload.terminate("vllm-x0")  # the rollout goes on
        record = await fleet.pass_s(20)

        assert fleet.workload.sets == []
        assert record.status is DecisionStatus.DONE
        assert fleet.workload.pods() == ["vllm-x1", "vllm-x2"]


DECODE_SET = "statefulset/decode"


@pytest.mark.parametrize("workload", [DEPLOYMENT, "statefulset/prefill"])
async def test_each_role_scales_its_own_workload(workload: str) -> None:
    async with ScaledPool(workload, 2, DECODE_SET) as fleet:
        roles = {name: spec.role for name, spec in (await fleet.instances()).items()}
        assert sorted(roles.values()) == ["decode", "decode", "prefill", "prefill"]
        fleet.decode_plan.wanted = 3
        await fleet.pass_s(6)
        assert (fleet.workload.sets, fleet.decode_workload.sets) == ([], [3])

        fleet.plan.wanted = 1
        record = await fleet.pass_s(4)
        fleet.workload.finish()
        await fleet.pass_s(3)
        assert (fleet.workload.sets, fleet.decode_workload.sets) == ([1], [3])
        assert record.leaving[0].startswith(fleet.workload.name)

        fleet.decode_plan.wanted = 2
        await fleet.pass_s(4)
        of_decode = await fleet.pool.publications.scaling("decode")
        assert of_decode.leaving == ("decode-2",)
        assert (fleet.workload.sets, fleet.decode_workload.sets) == ([1], [3, 2])
        assert "accepted: decode: statefulset/decode: 3 -> 2 replicas, decode-2 leaves" in await fleet.log()


async def test_a_role_whose_workload_is_refused_does_not_stop_the_other() -> None:
    async with ScaledPool(DEPLOYMENT, 1, DECODE_SET) as fleet:
        fleet.cluster.refuse = lambda call: FAILURES["403"] if call.path == fleet.decode_workload.path else None
        fleet.plan.wanted = fleet.decode_plan.wanted = 2
        record = await fleet.pass_s(6)

        assert (record.status, fleet.workload.sets) == (DecisionStatus.DONE, [2])
        assert (await fleet.pool.publications.scaling("decode")).is_open
        fleet.cluster.refuse = lambda _: None
        await fleet.pass_s(20)
        assert fleet.decode_workload.sets == [2]


async def test_both_roles_come_from_zero_and_return_to_it() -> None:
    async with ScaledPool(DEPLOYMENT, 0, DECODE_SET, min_instances=0) as fleet:
        fleet.plan.wanted = fleet.decode_plan.wanted = 1
        await fleet.pass_s(6)
        assert sorted((await fleet.states()).values()) == ["ready", "ready"]
        fleet.plan.wanted = fleet.decode_plan.wanted = 0
        await fleet.pass_s(5)
        fleet.workload.finish()
        fleet.decode_workload.finish()
        await fleet.pass_s(3)

        assert (fleet.workload.sets, fleet.decode_workload.sets) == ([1, 0], [1, 0])
        assert await fleet.states() == {}


async def test_the_next_leader_continues_both_roles() -> None:
    async with ScaledPool(DEPLOYMENT, 1, DECODE_SET) as fleet:
        fleet.workload.is_ready = fleet.decode_workload.is_ready = False
        fleet.plan.wanted = fleet.decode_plan.wanted = 2
        await fleet.pass_s(3)
        fleet.new_leader()
        await fleet.pass_s(5)
        assert (fleet.workload.sets, fleet.decode_workload.sets) == ([2], [2])
        fleet.workload.make_ready()
        fleet.decode_workload.make_ready()

        assert (await fleet.pass_s(4)).status is DecisionStatus.DONE
        assert (await fleet.pool.publications.scaling("decode")).status is DecisionStatus.DONE


def right_of(call: Call) -> tuple[str, str, str]:
    """The group, resource and verb that the API server asks its rules for."""
    parts = call.path.removeprefix("/apis/").removeprefix("/api/").split("/")
    group, parts = ("", parts) if parts[0] == "v1" else (parts[0], parts[1:])
    _, _, _, resource, *of_one = parts
    if len(of_one) > 1:
        resource = f"{resource}/{of_one[1]}"
    verb = "patch" if call.method == "PATCH" else "watch" if call.is_watch else "get" if of_one else "list"
    return group, resource, verb


@pytest.mark.parametrize(
    ("workload", "own"),
    [
        (
            DEPLOYMENT,
            {("apps", "deployments/scale", "get"), ("apps", "deployments/scale", "patch"), ("", "pods", "patch")},
        ),
        (STATEFUL_SET, {("apps", "statefulsets/scale", "get"), ("apps", "statefulsets/scale", "patch")}),
        (GROUPS, {(LWS, "leaderworkersets/scale", "get"), (LWS, "leaderworkersets/scale", "patch")}),
    ],
)
async def test_the_rights_that_the_document_lists_are_needed_and_no_others(
    workload: str, own: set[tuple[str, str, str]]
) -> None:
    async with ScaledPool(workload, 1) as fleet:
        fleet.plan.wanted = 2
        await fleet.pass_s(5)
        fleet.plan.wanted = 1
        await fleet.pass_s(5)
        assert fleet.workload.sets == [2, 1]

        assert {right_of(call) for call in fleet.cluster.calls} == own | {("", "pods", "list"), ("", "pods", "watch")}


def test_the_settings_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="needs workload"):
        AutoscaleSettings(max_instances=2, actuator="kubernetes")
    with pytest.raises(ValueError, match="workload"):
        AutoscaleSettings(max_instances=2, actuator="kubernetes", workload="daemonset/vllm")
    settings = AutoscaleSettings(max_instances=2, actuator="kubernetes", workload=DEPLOYMENT)
    with pytest.raises(ValueError, match="needs discovery"):
        PoolSettings(autoscale=settings)
    scales_both = settings.model_copy(update={"decode": DecodeAutoscaleSettings(max_instances=2, workload=DECODE_SET)})
    found = DiscoverySettings(kubernetes=KubernetesSettings(label_selector="app=vllm"))
    with pytest.raises(ValueError, match=r"move_roles and autoscale\.decode both change"):
        PoolSettings(autoscale=scales_both, discovery=found, move_roles=True)
    assert PoolSettings(autoscale=settings, discovery=found).moves_roles
    assert not PoolSettings(autoscale=scales_both, discovery=found).moves_roles
    assert not settings.leaves_in_order
    assert settings.model_copy(update={"workload": STATEFUL_SET}).leaves_in_order
