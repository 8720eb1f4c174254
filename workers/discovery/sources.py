"""Sources of a pool's pods: a label selector, an InferencePool, or a Service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dualmap.runtime.clock import Clock
from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.discovery.plan import Found
from dualmap.workers.discovery.pods import Pod, Reading, Rule, found_from, merged, pod_from, pods_of_slice, reading_of
from dualmap.workers.discovery.watch import Watch

POOL_CHECK_S = 0.25
"""Time between two looks at whether the InferencePool was changed."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The instances that a source has found."""

    found: Mapping[str, Found]
    left_out: tuple[str, ...]
    pods: int


class Source(Protocol):
    """Looks for instances while ``run`` runs."""

    name: str
    """Name of the source for people."""

    async def run(self) -> None:
        """Run until cancelled."""

    def sighting(self) -> Sighting | None:
        """The last sighting, the same object while it is unchanged; None before the first."""

    @property
    def trouble(self) -> str | None:
        """Why that may be out of date; None while it is not."""


class _Sightings:
    """Makes a sighting of pods once for each change of them, and reads each pod once."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._objects: object = None
        self._readings: dict[str, tuple[Pod, Reading]] = {}
        self._made: Sighting | None = None

    def of(self, objects: Mapping[str, Any], pods: Callable[[], Iterable[Pod]]) -> Sighting:
        """``pods`` gives the pods that are in the objects of a watch."""
        if self._made is None or objects is not self._objects:
            self._objects = objects
            self._readings = {pod.uid: (pod, self._read(pod)) for pod in pods()}
            found, left_out = found_from(reading for _, reading in self._readings.values())
            self._made = Sighting(found, left_out, len(self._readings))
        return self._made

    def _read(self, pod: Pod) -> Reading:
        former = self._readings.get(pod.uid)
        return former[1] if former is not None and former[0] is pod else reading_of(pod, self._rule)


class PodSource:
    """The pods that a label selector selects."""

    def __init__(self, watch: Watch[Pod], rule: Rule, name: str) -> None:
        self.name = name
        self._watch = watch
        self._sightings = _Sightings(rule)

    async def run(self) -> None:
        await self._watch.run()

    def sighting(self) -> Sighting | None:
        objects = self._watch.objects
        return None if objects is None else self._sightings.of(objects, objects.values)

    @property
    def trouble(self) -> str | None:
        return self._watch.trouble


class ServiceSource:
    """The pods that the EndpointSlices of a Service name, without what their labels say."""

    def __init__(self, watch: Watch[tuple[Pod, ...]], rule: Rule, name: str) -> None:
        self.name = name
        self._watch = watch
        self._sightings = _Sightings(rule)

    async def run(self) -> None:
        await self._watch.run()

    def sighting(self) -> Sighting | None:
        objects = self._watch.objects
        if objects is None:
            return None
        return self._sightings.of(objects, lambda: merged(pod for each in objects.values() for pod in each))

    @property
    def trouble(self) -> str | None:
        return self._watch.trouble


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The fields of an InferencePool that discovery reads."""

    selector: str
    ports: tuple[int, ...]


def pool_spec_from(given: Mapping[str, Any]) -> PoolSpec:
    """Raises ValueError, or the like, where it is no InferencePool of version v1."""
    spec = given["spec"]
    labels = spec["selector"]["matchLabels"]
    if not labels or not all(isinstance(each, str) for pair in labels.items() for each in pair):
        raise ValueError("spec.selector.matchLabels selects nothing")
    ports = tuple(each["number"] for each in spec["targetPorts"])
    if not ports or not all(isinstance(each, int) for each in ports):
        raise ValueError("spec.targetPorts names no port")
    return PoolSpec(",".join(f"{name}={text}" for name, text in sorted(labels.items())), ports)


class InferencePoolSource:
    """The pods that an InferencePool selects. Where its selector changes, the new pods count once they are listed;
    where it is gone, what it selected last stays."""

    def __init__(
        self,
        watch: Watch[PoolSpec],
        pods: Callable[[str, Rule], PodSource],
        rule: Rule,
        *,
        own_port: bool,
        name: str,
        clock: Clock,
    ) -> None:
        """``pods`` makes the source for a selector. With ``own_port`` the rule's port counts, not the pool's."""
        self.name = name
        self._watch = watch
        self._pods = pods
        self._rule = rule
        self._own_port = own_port
        self._clock = clock
        self._spec: PoolSpec | None = None
        self._source: PodSource | None = None
        self._last: Sighting | None = None

    async def run(self) -> None:
        watching: list[asyncio.Task[None]] = [asyncio.create_task(self._watch.run())]
        try:
            while True:
                spec = self._current()
                if spec is not None and spec != self._spec:
                    for task in watching[1:]:
                        task.cancel()
                    await asyncio.gather(*watching[1:], return_exceptions=True)
                    rule = self._rule if self._own_port else replace(self._rule, ports=spec.ports)
                    self._spec, self._source = spec, self._pods(spec.selector, rule)
                    watching[1:] = [asyncio.create_task(self._source.run())]
                await self._clock.sleep(POOL_CHECK_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    def _current(self) -> PoolSpec | None:
        """The pool as it is now; None where it is not there."""
        return next(iter(self._watch.objects.values()), None) if self._watch.objects else None

    def sighting(self) -> Sighting | None:
        found = self._source.sighting() if self._source is not None else None
        if found is not None:
            self._last = found
        return self._last

    @property
    def trouble(self) -> str | None:
        if self._watch.trouble is not None:
            return self._watch.trouble
        if self._watch.objects is not None and not self._watch.objects:
            return f"there is no {self.name}; what it selected last stays"
        return self._source.trouble if self._source is not None else None


def source_of(
    settings: KubernetesSettings,
    models: frozenset[str] | None,
    api: KubernetesApi,
    *,
    clock: Clock,
    jitter: random.Random,
) -> Source:
    """The source that the settings name; ``models`` are the names that the pool serves, None if it names none."""
    namespace = api.namespace
    rule = Rule(scheme=settings.scheme, models=models)
    if settings.port is not None:
        rule = replace(rule, ports=(settings.port,))

    def pods(selector: str, rule: Rule) -> PodSource:
        path = f"/api/v1/namespaces/{namespace}/pods"
        watch = Watch(
            api, path, {"labelSelector": selector}, pod_from, resync_s=settings.resync_s, clock=clock, jitter=jitter
        )
        return PodSource(watch, rule, f"pods of namespace {namespace} with {selector}")

    if settings.label_selector is not None:
        return pods(settings.label_selector, rule)
    if settings.service is not None:
        slices = Watch(
            api,
            f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={settings.service}"},
            lambda given: pods_of_slice(given, own_port=settings.port is not None),
            resync_s=settings.resync_s,
            clock=clock,
            jitter=jitter,
        )
        return ServiceSource(slices, rule, f"Service {settings.service} of namespace {namespace}")
    assert settings.inference_pool is not None
    pools = Watch(
        api,
        f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools",
        {"fieldSelector": f"metadata.name={settings.inference_pool}"},
        pool_spec_from,
        resync_s=settings.resync_s,
        clock=clock,
        jitter=jitter,
    )
    return InferencePoolSource(
        pools,
        pods,
        rule,
        own_port=settings.port is not None,
        name=f"InferencePool {settings.inference_pool} of namespace {namespace}",
        clock=clock,
    )
