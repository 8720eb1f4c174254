"""What the API of Kubernetes accepts: its own kinds by its schemas, others by the fields that their projects name."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import referencing
from kubernetes_validate import utils

NEWEST = utils.all_versions()[-3:]
"""The three newest versions of the API that there are schemas of, as 1.37.0."""

Shape = type | tuple[type, ...] | list["Shape"] | dict[str, "Shape"] | None
"""A type, a list of one shape, a mapping of fields (a name that ends in * is required), or None: anything."""

_LABELS: Shape = {"matchLabels": None, "matchExpressions": None}
_TARGET: Shape = {"group*": str, "kind*": str, "name*": str}
_TRIGGER: Shape = {"type*": str, "metricType": str, "metadata*": None}
_BACKEND: Shape = {"group": str, "kind": str, "name*": str, "namespace": str, "port": int, "weight": int}

OTHER_KINDS: dict[tuple[str, str], Shape] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {
        "selector*": _LABELS,
        "endpoints*": [{"port*": str, "path": str, "honorLabels": bool, "interval": str}],
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "groups*": [
            {
                "name*": str,
                "rules*": [{"alert*": str, "expr*": str, "for": str, "labels": None, "annotations": None}],
            }
        ]
    },
    ("keda.sh/v1alpha1", "ScaledObject"): {
        "scaleTargetRef*": {"apiVersion": str, "kind": str, "name*": str},
        "minReplicaCount": int,
        "maxReplicaCount": int,
        "pollingInterval": int,
        "cooldownPeriod": int,
        "fallback": {"failureThreshold*": int, "replicas*": int, "behavior": str},
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": None}},
        "triggers*": [_TRIGGER],
    },
    ("gateway.networking.k8s.io/v1", "Gateway"): {
        "gatewayClassName*": str,
        "listeners*": [{"name*": str, "port*": int, "protocol*": str, "hostname": str, "allowedRoutes": None}],
    },
    ("gateway.networking.k8s.io/v1", "GatewayClass"): {"controllerName*": str, "parametersRef": None},
    ("networking.istio.io/v1alpha3", "EnvoyFilter"): {
        "targetRefs": [_TARGET],
        "configPatches*": [
            {
                "applyTo*": str,
                "match": {"context": str, "listener": {"filterChain": {"filter": {"name*": str}}}},
                "patch*": {"operation*": str, "value": None},
            }
        ],
    },
    ("gateway.envoyproxy.io/v1alpha1", "EnvoyPatchPolicy"): {
        "targetRef*": _TARGET,
        "type*": str,
        "jsonPatches": [
            {"type*": str, "name*": str, "operation*": {"op*": str, "path": str, "jsonPath": str, "value": None}}
        ],
    },
    ("gateway.envoyproxy.io/v1alpha1", "ClientTrafficPolicy"): {
        "targetRefs": [_TARGET],
        "connection": {"bufferLimit": (int, str)},
    },
    ("networking.istio.io/v1", "DestinationRule"): {
        "host*": str,
        "trafficPolicy": {"tls": {"mode*": str, "credentialName": str, "insecureSkipVerify": bool}},
    },
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
        "parentRefs": [{"group": str, "kind": str, "name*": str, "namespace": str, "sectionName": str}],
        "hostnames": [str],
        "rules*": [
            {
                "matches": [{"path": {"type": str, "value": str}, "headers": None}],
                "timeouts": {"request": str, "backendRequest": str},
                "backendRefs": [_BACKEND],
            }
        ],
    },
    ("inference.networking.k8s.io/v1", "InferencePool"): {
        "selector*": {"matchLabels*": None},
        "targetPorts*": [{"number*": int}],
        "appProtocol": str,
        "endpointPickerRef": {
            "group": str,
            "kind": str,
            "name*": str,
            "port": {"number*": int},
            "failureMode": str,
        },
    },
}
"""Shapes of `spec` of kinds that the API itself does not define."""


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    group, _, number = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.partition('.')[0]}-{number}" if group else f"{kind.lower()}-{number}"
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    schema = utils.schema_contents(f"{folder}/{name}.json", version)
    registry = referencing.Resource.from_contents(schema) @ (_definitions(version) @ referencing.Registry())
    return jsonschema.validators.Draft202012Validator(schema, registry=registry)


@functools.cache
def _definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    return referencing.Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))


def complaints(manifest: dict[str, Any]) -> list[str]:
    """Everything that the three newest versions of the API would refuse in a manifest; unknown fields are refused."""
    kind, api_version = manifest["kind"], manifest["apiVersion"]
    shape = OTHER_KINDS.get((api_version, kind))
    if shape is not None:
        return _unlike(manifest["spec"], shape, f"{kind}.spec")
    found: list[str] = []
    for version in NEWEST:
        try:
            validator = _validator(version, kind, api_version)
        except FileNotFoundError:
            found.append(f"{version}: there is no {kind} of {api_version}")
            continue
        for error in validator.iter_errors(json.loads(json.dumps(manifest))):
            found.append(f"{version}: {kind} {'.'.join(map(str, error.path))}: {error.message}")
    return found


def _unlike(value: Any, shape: Shape, path: str) -> list[str]:
    """Where a value is not of a shape."""
    if shape is None:
        return []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [found for number, each in enumerate(value) for found in _unlike(each, shape[0], f"{path}[{number}]")]
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{path} is no mapping"]
        fields = {name.rstrip("*"): each for name, each in shape.items()}
        missing = [name[:-1] for name in shape if name.endswith("*") and name[:-1] not in value]
        found = [f"{path}.{name} is missing" for name in missing]
        for name, each in value.items():
            path_below = f"{path}.{name}"
            found += _unlike(each, fields[name], path_below) if name in fields else [f"{path_below} is unknown"]
        return found
    return [] if isinstance(value, shape) else [f"{path} is of another type: {value!r}"]
