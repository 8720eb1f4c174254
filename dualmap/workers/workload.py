"""Actuator kubernetes: the ``scale`` subresource of a Deployment, a StatefulSet or a LeaderWorkerSet.

Each replica is a pod (of a LeaderWorkerSet a group, of which the leader is the pod), and each pod one instance, which
discovery enters and removes. An act reads the workload and its pods, and changes the scale from just the version that
it has read: what it finds done already it does not do again, and what another writer changed meanwhile is read again.

Up: as many replicas as the decision wants instances, beside pods that serve nothing, as those that an operator drained.
The number is never lowered by this.

Down: exactly the pods of the instances that left, which the fleet has drained before. A Deployment removes the pods
with the lowest deletion cost first, so these get the lowest there is, and a pod that has it from a decision that was
withdrawn loses it. The other two remove the highest number first, so it is the plan that chooses that one; where it
cannot go, because another pod above it serves, nothing is changed. So no other pod than those is lost, with one
exception: a pod of a StatefulSet above them that the fleet does not know, as it has not started yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from dualmap.scheduling.scaling.leaving import ordinal_of
from dualmap.scheduling.scaling.scale_job import ActuatorReply
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.statestore.errors import StoreError
from dualmap.workers.discovery.kubernetes_api import ApiError, KubernetesApi
from dualmap.workers.pool_reader import PoolReader

TIMEOUT_S = 20.0
"""Timeout of one call, which lists pods and may change many."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
LOWEST_COST: Final = "-2147483648"
_PLURALS: Final = {
    "deployment": "apis/apps/v1/{}/deployments",
    "statefulset": "apis/apps/v1/{}/statefulsets",
    "leaderworkerset": "apis/leaderworkerset.x-k8s.io/v1/{}/leaderworkersets",
}
_COUNTED = frozenset({InstanceState.READY, InstanceState.STARTING})
"""States that a decision counts."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The scale of a workload, as it was read."""

    version: str
    replicas: int
    selector: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One of its pods that does not terminate."""

    name: str
    deletion_cost: str


class Workload:
    """A workload as an actuator."""

    def __init__(self, api: KubernetesApi, workload: str, reader: PoolReader) -> None:
        """``workload`` is KIND/NAME."""
        self._api = api
        self._workload = workload
        self._reader = reader

    async def call(self, pool: str, record: ScaleRecord) -> ActuatorReply:  # others send it
        try:
            async with asyncio.timeout(TIMEOUT_S):
                members = (await self._reader.membership()).instances
                scale = await self._scale()
                pods = await self._pods(scale.selector)
                if record.leaving:
                    return await self._shrink(record, members, scale, pods)
                return await self._grow(record, members, scale, pods)
        except ApiError as error:
            return ActuatorReply(False, f"{self._workload}: {error}", error.retry_after_s)
        except TimeoutError:
            return ActuatorReply(False, f"{self._workload}: the API server took longer than {TIMEOUT_S:.0f} s")
        except (httpx.HTTPError, OSError, StoreError) as error:
            return ActuatorReply(False, f"{self._workload}: {type(error).__name__} {error}".strip())

    async def close(self) -> None:
        await self._api.close()

    # reading -----------------------------------------------------------------------------------------------------
    @property
    def _is_ordered(self) -> bool:
        """Whether it removes the highest number first."""
        return not self._workload.startswith("deployment/")

    @property
    def _scale_path(self) -> str:
        kind, _, name = self._workload.partition("/")
        return f"/{_PLURALS[kind].format(f'namespaces/{self._api.namespace}')}/{name}/scale"

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self._api.namespace}/pods"

    async def _scale(self) -> Scale:
        read = await self._api.get(self._scale_path)
        try:
            version, status = read["metadata"]["resourceVersion"], read.get("status") or {}
            replicas, selector = (read.get("spec") or {}).get("replicas", 0), status.get("selector", "")
            if not isinstance(replicas, int) or not isinstance(selector, str) or not selector:
                raise ValueError("spec.replicas or status.selector is missing")
            return Scale(str(version), replicas, selector)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ApiError(f"the API server sent a scale that cannot be read: {error!r}") from error

    async def _pods(self, selector: str) -> dict[str, Pod]:
        """The pods of the workload that do not terminate, by uid."""
        pods: dict[str, Pod] = {}
        async for page in self._api.pages(self._pods_path, {"labelSelector": selector}):
            for each in page.get("items") or ():
                metadata: Mapping[str, Any] = each.get("metadata") or {}
                if metadata.get("deletionTimestamp") is None and _runs(each):
                    cost = (metadata.get("annotations") or {}).get(DELETION_COST, "")
                    pods[str(metadata.get("uid"))] = Pod(str(metadata.get("name")), str(cost))
        return pods

    # acting ------------------------------------------------------------------------------------------------------
    async def _grow(
        self, record: ScaleRecord, members: Mapping[str, InstanceSpec], scale: Scale, pods: Mapping[str, Pod]
    ) -> ActuatorReply:
        decodes = record.role == Role.DECODE
        counted = {
            name for name, spec in members.items() if spec.state in _COUNTED and (spec.role is Role.DECODE) is decodes
        }
        elsewhere = sum(_uid(members[name]) not in pods for name in counted)
        serving = {_uid(members[name]) for name in counted}
        idle = {uid for spec in members.values() if (uid := _uid(spec)) in pods and uid not in serving}
        target = record.wanted - elsewhere + len(idle)
        if scale.replicas >= target:
            return ActuatorReply(True, f"{self._workload} has {scale.replicas} replicas already")
        return await self._set(scale, target, "")

    async def _shrink(
        self, record: ScaleRecord, members: Mapping[str, InstanceSpec], scale: Scale, pods: Mapping[str, Pod]
    ) -> ActuatorReply:
        parked = {name for name in record.spares if name in members and members[name].state is InstanceState.STANDBY}
        leaving = {name for name in (*record.leaving, *parked) if name in members}
        victims = {uid for name in leaving if (uid := _uid(members[name])) in pods}
        if not victims:
            return ActuatorReply(True, f"{self._workload}: the pods that leave are gone")
        for name, spec in members.items():
            if name not in leaving and _uid(spec) in victims:
                pod = pods[_uid(spec)].name
                return ActuatorReply(False, f"pod {pod} has the instance {name} beside the one that leaves")
        known = {_uid(spec) for spec in members.values()}
        target = (_target_in_order if self._is_ordered else _target)(scale.replicas, pods, victims, known)
        names = ", ".join(sorted(pods[uid].name for uid in victims))
        if target >= scale.replicas:
            return ActuatorReply(False, self._why_not(scale, pods, names))
        if not self._is_ordered:
            await self._set_deletion_costs(pods, victims)
        return await self._set(scale, target, f", {names} leave{'s'[: len(victims) == 1]}")

    def _why_not(self, scale: Scale, pods: Mapping[str, Pod], names: str) -> str:
        if self._is_ordered:
            return f"{self._workload} removes its highest number first, and a pod above {names} serves or is kept"
        return f"{self._workload} has {len(pods)} pods for {scale.replicas} replicas, {names} among them: a rollout?"

    async def _set_deletion_costs(self, pods: Mapping[str, Pod], victims: Collection[str]) -> None:
        for uid, pod in pods.items():
            cost: str | None = LOWEST_COST if uid in victims else None
            if (pod.deletion_cost == LOWEST_COST) is (uid in victims):
                continue
            await self._api.patch(f"{self._pods_path}/{pod.name}", {"metadata": {"annotations": {DELETION_COST: cost}}})

    async def _set(self, scale: Scale, replicas: int, who: str) -> ActuatorReply:
        patch = {"metadata": {"resourceVersion": scale.version}, "spec": {"replicas": replicas}}
        await self._api.patch(self._scale_path, patch)
        return ActuatorReply(True, f"{self._workload}: {scale.replicas} -> {replicas} replicas{who}")


def _runs(pod: Mapping[str, Any]) -> bool:
    """Whether the workload counts the pod: one that has ended is replaced."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _uid(spec: InstanceSpec) -> str:
    return (spec.origin or {}).get("uid", "")


def _target(replicas: int, pods: Mapping[str, Pod], victims: Collection[str], known: Collection[str]) -> int:
    """Replicas of a Deployment without the victims. Pods that it has not made yet are kept; where it has more pods than
    replicas, it removes some anyhow."""
    kept = sum(uid not in victims for uid in pods)
    return min(replicas, kept + max(0, replicas - len(pods)))


def _target_in_order(replicas: int, pods: Mapping[str, Pod], victims: Collection[str], known: Collection[str]) -> int:
    """Replicas of a workload with numbers, as few as leave every pod that the fleet knows and that is no victim."""
    kept = [ordinal_of(pods[uid].name) for uid in known if uid in pods and uid not in victims]
    return min(replicas, max(kept, default=-1) + 1)
