"""Sources of a pool's pods: a label selector, an InferencePool, or a Service."""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from dualmap.runtime.clock import Clock
from dualmap.runtime.discovery_settings import KubernetesSettings
from dualmap.workers.discovery.kubernetes_api import KubernetesApi
from dualmap.workers.discovery.plan import Found
from dualmap.workers.discovery.pods import Pod, Reading, Rule, found_from, merged, pod_from, pods_of_slice, reading_of
from dualmap.workers.discovery.watch import Kept, Watch

FOLLOW_S = 0.25
"""Time between two looks at whether the object that selects pods was changed."""


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
        self._seen: tuple[object, ...] = ()
        self._note = ""
        self._readings: dict[str, tuple[Pod, Reading]] = {}
        self._made: Sighting | None = None

    def of(self, seen: tuple[object, ...], pods: Callable[[], Iterable[Pod]], note: str = "") -> Sighting:
        """``seen`` are the objects of watches that ``pods`` gives the pods of; ``note`` stands before what is left
        out."""
        if self._made is None or note != self._note or any(map(operator.is_not, seen, self._seen)):
            self._seen, self._note = seen, note
            self._readings = {pod.uid: (pod, self._read(pod)) for pod in pods()}
            found, left_out = found_from(reading for _, reading in self._readings.values())
            self._made = Sighting(found, ((note,) if note else ()) + left_out, len(self._readings))
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
        return None if objects is None else self._sightings.of((objects,), objects.values)

    @property
    def trouble(self) -> str | None:
        return self._watch.trouble


class _Runs(Protocol):
    async def run(self) -> None: ...


Spec = TypeVar("Spec")
Made = TypeVar("Made", bound=_Runs)


class _Follower(Generic[Spec, Made]):
    """Watches one object, and runs what is made for its content, as it is now. What was made for it last stays where
    it is gone."""

    def __init__(self, watch: Watch[Spec], make: Callable[[Spec], Made | None], clock: Clock) -> None:
        """``make`` returns None where there is nothing to run for it."""
        self.watch = watch
        self._make = make
        self._clock = clock
        self._spec: Spec | None = None
        self.made: Made | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        watching: list[asyncio.Task[None]] = [asyncio.create_task(self.watch.run())]
        try:
            while True:
                spec = next(iter(self.watch.objects.values()), None) if self.watch.objects else None
                if spec is not None and spec != self._spec:
                    for task in watching[1:]:
                        task.cancel()
                    await asyncio.gather(*watching[1:], return_exceptions=True)
                    self._spec, self.made = spec, self._make(spec)
                    watching[1:] = [asyncio.create_task(self.made.run())] if self.made is not None else []
                await self._clock.sleep(FOLLOW_S)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)

    @property
    def is_missing(self) -> bool:
        """Whether the object is not there."""
        return self.watch.objects is not None and not self.watch.objects

    @property
    def is_followed(self) -> bool:
        """Whether something was made for the object, or need not be."""
        return self._spec is not None


def selector_from(given: Mapping[str, Any]) -> str:
    """The label selector of a Service; empty where it has none. Raises ValueError, or the like."""
    labels = given["spec"].get("selector") or {}
    if not all(isinstance(each, str) for pair in labels.items() for each in pair):
        raise ValueError("spec.selector is no mapping of texts")
    return ",".join(f"{name}={text}" for name, text in sorted(labels.items()))


class ServiceSource:
    """The pods that the EndpointSlices of a Service name. Slices say who serves, and have no labels of pods: these are
    read from the pods that the Service selects, where the worker may. Where it may not, or the Service selects none,
    pods are taken without them."""

    def __init__(
        self,
        slices: Watch[tuple[Pod, ...]],
        service: Watch[str],
        pods: Callable[[str], Watch[Pod]],
        rule: Rule,
        name: str,
        clock: Clock,
    ) -> None:
        """``service`` watches the Service, as its selector; ``pods`` makes the watch for a selector."""
        self.name = name
        self._slices = slices
        self._labelled: _Follower[str, Watch[Pod]] = _Follower(
            service, lambda selector: pods(selector) if selector else None, clock
        )
        self._sightings = _Sightings(rule)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as running:
            running.create_task(self._slices.run())
            running.create_task(self._labelled.run())

    def sighting(self) -> Sighting | None:
        slices = self._slices.objects
        labelled, note = self._labelled_pods()
        if slices is None or (labelled is None and not note and not self._has_no_labels):
            return None
        return self._sightings.of((slices, labelled), lambda: _with_labels(slices, labelled), note)

    @property
    def _has_no_labels(self) -> bool:
        return self._labelled.is_missing or (self._labelled.is_followed and self._labelled.made is None)

    def _labelled_pods(self) -> tuple[Mapping[str, Pod] | None, str]:
        """The pods with their labels, by uid, and why these cannot be read. Neither: they are not listed yet."""
        pods = self._labelled.made
        if pods is not None and pods.objects is not None:
            return pods.objects, ""
        trouble = self._labelled.watch.trouble if pods is None else pods.trouble
        return None, f"labels of all pods, so that each is mixed: {trouble}" if trouble else ""

    @property
    def trouble(self) -> str | None:
        if self._slices.trouble is not None:
            return self._slices.trouble
        pods = self._labelled.made
        return pods.trouble if pods is not None and pods.objects is not None else None


def _with_labels(slices: Mapping[str, tuple[Pod, ...]], labelled: Mapping[str, Pod] | None) -> Iterator[Pod]:
    """The pods of the slices. One whose labels are not read yet is none yet: it would be entered in a wrong role."""
    for pod in merged(pod for each in slices.values() for pod in each):
        if labelled is None:
            yield pod
        elif (known := labelled.get(pod.uid)) is not None:
            yield replace(pod, labels=known.labels, annotations=known.annotations)


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

    def __init__(self, watch: Watch[PoolSpec], pods: Callable[[PoolSpec], PodSource], name: str, clock: Clock) -> None:
        """``pods`` makes the source for what the pool selects."""
        self.name = name
        self._selected = _Follower(watch, pods, clock)
        self._last: Sighting | None = None

    async def run(self) -> None:
        await self._selected.run()

    def sighting(self) -> Sighting | None:
        pods = self._selected.made
        found = pods.sighting() if pods is not None else None
        if found is not None:
            self._last = found
        return self._last

    @property
    def trouble(self) -> str | None:
        if self._selected.watch.trouble is not None:
            return self._selected.watch.trouble
        if self._selected.is_missing:
            return f"there is no {self.name}; what it selected last stays"
        return self._selected.made.trouble if self._selected.made is not None else None


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
    rule = Rule(
        scheme=settings.scheme, models=models, role_label=settings.role_label, revision_label=settings.revision_label
    )
    if settings.port is not None:
        rule = replace(rule, ports=(settings.port,))

    def watch(path: str, selector: Mapping[str, str], read: Callable[[Mapping[str, Any]], Kept]) -> Watch[Kept]:
        path = path.replace("*", f"namespaces/{namespace}")
        return Watch(api, path, selector, read, clock=clock, jitter=jitter)

    def pods(selector: str) -> Watch[Pod]:
        return watch("/api/v1/*/pods", {"labelSelector": selector}, pod_from)

    if settings.label_selector is not None:
        name = f"pods of namespace {namespace} with {settings.label_selector}"
        return PodSource(pods(settings.label_selector), rule, name)
    if settings.service is not None:
        slices = watch(
            "/apis/discovery.k8s.io/v1/*/endpointslices",
            {"labelSelector": f"kubernetes.io/service-name={settings.service}"},
            lambda given: pods_of_slice(given, own_port=settings.port is not None),
        )
        service = watch("/api/v1/*/services", {"fieldSelector": f"metadata.name={settings.service}"}, selector_from)
        return ServiceSource(slices, service, pods, rule, f"Service {settings.service} of namespace {namespace}", clock)
    assert settings.inference_pool is not None

    def selected(spec: PoolSpec) -> PodSource:
        in_pool = rule if settings.port is not None else replace(rule, ports=spec.ports)
        return PodSource(pods(spec.selector), in_pool, f"pods with {spec.selector}")

    pools = watch(
        "/apis/inference.networking.k8s.io/v1/*/inferencepools",
        {"fieldSelector": f"metadata.name={settings.inference_pool}"},
        pool_spec_from,
    )
    name = f"InferencePool {settings.inference_pool} of namespace {namespace}"
    return InferencePoolSource(pools, selected, name, clock)
