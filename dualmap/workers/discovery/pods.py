"""Pods of Kubernetes, and EndpointSlices, as instances: what is read from the API's objects, and what follows. Pure.

Labels and annotations that count, ours first; a label wins over an annotation of the same name:

- role: ``dualmap/role`` (mixed, prefill, decode), ``llm-d.ai/role``, the label that ``role_label`` names (as Dynamo's
  DYN_EPP_ROLE_LABEL does), AIBrix's ``role-name``
- ports: ``dualmap/port``, ``llm-d.ai/active-ports``, ``smg.ai/worker-ports``, ``model.aibrix.ai/port``. Each port is a
  server of its own, as data-parallel ranks are where each has a port
- data-parallel ranks behind one port: ``dualmap/data-parallel-ranks``, as 8 (ranks 0 to 7) or 8-15
- model: ``dualmap/model``, ``model.aibrix.ai/name``. A pod of another model than the pool's is left out; adapters and
  served names are what the server itself lists
- aliases: ``dualmap/aliases``, further names of the pool's model for clients, with commas between them
- revision: ``dualmap/revision``, else the label that ``revision_label`` names, such as what controllers set at each
  change: ``pod-template-hash`` (Deployment), ``controller-revision-hash`` (StatefulSet)
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from dualmap.scheduling.revisions.weights import LABEL
from dualmap.scheduling.state.instance import Role
from dualmap.workers.discovery.plan import Found

DEFAULT_PORT = 8000
MAX_RANKS = 1024
_PORT_NAMES = ("dualmap/port", "llm-d.ai/active-ports", "smg.ai/worker-ports", "model.aibrix.ai/port")
_ROLE_NAMES = ("dualmap/role", "llm-d.ai/role")
_MODEL_NAMES = ("dualmap/model", "model.aibrix.ai/name")
_ALIASES_NAME = "dualmap/aliases"
_REVISION_NAME = "dualmap/revision"
_RANKS_NAME = "dualmap/data-parallel-ranks"
_ROLES = {
    "mixed": Role.MIXED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "both": Role.MIXED,
    "prefill-decode": Role.MIXED,
    "encode-prefill": Role.PREFILL,
    "encode-decode": Role.DECODE,
    "encode-prefill-decode": Role.MIXED,
}
_RANKS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,112}")
MAX_ALIASES = 64
_ALIAS = re.compile(r"[!-~]{1,256}")


@dataclass(frozen=True, slots=True)
class Rule:
    """How a pool reads the pods that were selected for it."""

    ports: tuple[int, ...] = (DEFAULT_PORT,)
    scheme: str = "http"
    models: frozenset[str] | None = None
    """Names that the pool serves; None: whatever its instances serve."""
    role_label: str | None = None
    """A further label that names the role."""
    revision_label: str | None = None
    """A further label that names the revision."""


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a pod that discovery reads."""

    uid: str
    name: str
    _: KW_ONLY
    ip: str
    is_ready: bool
    is_terminating: bool
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    ports: tuple[int, ...] = ()
    """Ports of its servers, by the EndpointSlice that named it; empty: by the rule."""

    @property
    def not_serving(self) -> str:
        """Why it takes no new requests; empty while it serves."""
        if self.is_terminating:
            return "its pod terminates"
        if not self.is_ready:
            return "its pod is not ready"
        return "" if self.ip else "its pod has no address"


class UnfitPodError(ValueError):
    """A pod says something of itself with which it cannot be an instance."""


def _texts(given: Any, where: str) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise ValueError(f"{where} is no mapping of texts")
    return given


def _section(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = given.get(name) or {}
    if not isinstance(section, dict):
        raise ValueError(f"{name} is no object")
    return section


def _objects(given: Any, where: str) -> list[dict[str, Any]]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise ValueError(f"{where} is no list of objects")
    return given


def _text(given: Mapping[str, Any], name: str) -> str:
    text = given.get(name)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name} is missing")
    return text


def pod_from(given: Mapping[str, Any]) -> Pod:
    """Raises ValueError where it is no pod. Ready is the condition, into which the kubelet folds readiness gates."""
    metadata, status = _section(given, "metadata"), _section(given, "status")
    conditions = _objects(status.get("conditions"), "status.conditions")
    phase = status.get("phase", "Running")
    return Pod(
        _text(metadata, "uid"),
        _text(metadata, "name"),
        ip=str(status.get("podIP") or ""),
        is_ready=phase == "Running"
        and any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
        is_terminating=metadata.get("deletionTimestamp") is not None,
        labels=_texts(metadata.get("labels"), "metadata.labels"),
        annotations=_texts(metadata.get("annotations"), "metadata.annotations"),
    )


def pods_of_slice(given: Mapping[str, Any], *, own_port: bool) -> tuple[Pod, ...]:
    """The pods that an EndpointSlice (discovery.k8s.io/v1) names, without their labels; with ``own_port`` the rule's
    port counts, not the first of the slice. Raises ValueError."""
    _text(_section(given, "metadata"), "uid")
    numbers = [each.get("port") for each in _objects(given.get("ports"), "ports")]
    ports = () if own_port else tuple(number for number in numbers if isinstance(number, int))[:1]
    return tuple(
        pod for each in _objects(given.get("endpoints"), "endpoints") if (pod := _pod_of_endpoint(each, ports))
    )


def _pod_of_endpoint(endpoint: Mapping[str, Any], ports: tuple[int, ...]) -> Pod | None:
    """None where the endpoint is no pod. A condition that is not given is that of a ready endpoint."""
    target, conditions = _section(endpoint, "targetRef"), _section(endpoint, "conditions")
    if target.get("kind") != "Pod":
        return None
    addresses = endpoint.get("addresses")
    if not isinstance(addresses, list) or not addresses:
        raise ValueError("an endpoint has no addresses")
    ready, terminating = conditions.get("ready") is not False, conditions.get("terminating") is True
    return Pod(
        _text(target, "uid"),
        _text(target, "name"),
        ip=str(addresses[0]),
        is_ready=ready,
        is_terminating=terminating,
        labels={},
        annotations={},
        ports=ports,
    )


def merged(pods: Iterable[Pod]) -> Iterator[Pod]:
    """Each pod once: while endpoints move between slices, two name it, of which the one where it serves counts."""
    best: dict[str, Pod] = {}
    for pod in pods:
        known = best.get(pod.uid)
        if known is None or (known.not_serving and not pod.not_serving):
            best[pod.uid] = pod
    yield from best.values()


@dataclass(frozen=True, slots=True)
class Reading:
    """The instances that a pod is, or why it is none although it was selected."""

    instances: tuple[Found, ...] = ()
    left_out: str = ""


def reading_of(pod: Pod, rule: Rule) -> Reading:
    """The instances of a pod by the rule, or why it has none."""
    try:
        return Reading(tuple(_instances_of(pod, rule)))
    except UnfitPodError as error:
        return Reading(left_out=f"{pod.name}: {error}")


def found_from(readings: Iterable[Reading]) -> tuple[dict[str, Found], tuple[str, ...]]:
    """The instances by id, and the pods that are left out. Of two pods of one name, the one that does not terminate
    counts."""
    found: dict[str, Found] = {}
    left_out: list[str] = []
    for reading in readings:
        if reading.left_out:
            left_out.append(reading.left_out)
        for each in reading.instances:
            known = found.get(each.instance_id)
            if known is None or known.is_ending or not each.is_ending:
                found[each.instance_id] = each
    return found, tuple(left_out)


def _instances_of(pod: Pod, rule: Rule) -> Iterator[Found]:
    model = _said(pod, *_MODEL_NAMES)
    if model is not None and rule.models is not None and model not in rule.models:
        raise UnfitPodError(f"it says that it serves {model!r}, not a model of the pool")
    if not _NAME.fullmatch(pod.name):
        raise UnfitPodError("its name is longer than the 112 characters that leave room for a port and a rank in an id")
    ports, ranks = _ports(pod, rule), _ranks(pod)
    first = Found(
        pod.name,
        pod.uid,
        "",
        _role(pod, rule),
        aliases=_aliases(pod),
        revision=_revision(pod, rule),
        not_serving=pod.not_serving,
        is_ending=pod.is_terminating,
    )
    for port in ports:
        name = pod.name if len(ports) == 1 else f"{pod.name}:{port}"
        at_port = replace(first, instance_id=name, url=_url(rule.scheme, pod.ip, port))
        if ranks is None:
            yield at_port
        else:
            yield from (replace(at_port, instance_id=f"{name}:dp{rank}", data_parallel_rank=rank) for rank in ranks)


def _said(pod: Pod, *names: str) -> str | None:
    """The text of a label, else of an annotation, of the first of these names that the pod has."""
    for name in names:
        text = pod.labels.get(name, pod.annotations.get(name))
        if text is not None:
            return text.strip()
    return None


def _aliases(pod: Pod) -> tuple[str, ...]:
    names = [each.strip() for each in (_said(pod, _ALIASES_NAME) or "").split(",") if each.strip()]
    if len(names) > MAX_ALIASES or not all(map(_ALIAS.fullmatch, names)):
        raise UnfitPodError(f"{_ALIASES_NAME} names no model names without blanks, {MAX_ALIASES} at most")
    return tuple(dict.fromkeys(names))


def _revision(pod: Pod, rule: Rule) -> str:
    text = _said(pod, _REVISION_NAME, *((rule.revision_label,) if rule.revision_label else ())) or ""
    if text and not re.fullmatch(LABEL, text):
        raise UnfitPodError(f"its revision {text!r} is no label: 63 letters, digits and . _ : / @ + - at most")
    return text


def _role(pod: Pod, rule: Rule) -> Role:
    text = _said(pod, *_ROLE_NAMES, *((rule.role_label,) if rule.role_label else ()))
    if text is None:
        # AIBrix's label has a name that others may use too: what is no role of ours says nothing.
        return _ROLES.get(pod.labels.get("role-name", ""), Role.MIXED)
    if text not in _ROLES:
        raise UnfitPodError(f"its role {text!r} is none of {', '.join(_ROLES)}")
    return _ROLES[text]


def _ports(pod: Pod, rule: Rule) -> tuple[int, ...]:
    text = _said(pod, *_PORT_NAMES)
    if text is None:
        return pod.ports or rule.ports
    ports = [each.strip() for each in text.split(",") if each.strip()]
    if not ports or not all(each.isdecimal() and len(each) <= 5 and 0 < int(each) <= 65_535 for each in ports):
        raise UnfitPodError(f"{text!r} names no ports")
    return tuple(dict.fromkeys(map(int, ports)))


def _ranks(pod: Pod) -> range | None:
    text = _said(pod, _RANKS_NAME)
    if text is None:
        return None
    matched = _RANKS.fullmatch(text)
    ranks = range(0)
    if matched:
        first, last = matched.groups()
        ranks = range(int(first)) if last is None else range(int(first), int(last) + 1)
    if not 0 < len(ranks) <= MAX_RANKS:
        raise UnfitPodError(f"{_RANKS_NAME} is {text!r}, neither a number of ranks, as 8, nor a span of them, as 8-15")
    return ranks


def _url(scheme: str, address: str, port: int) -> str:
    try:
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        host = address  # none yet, or the name of an EndpointSlice of names
    return f"{scheme}://{host}:{port}"
