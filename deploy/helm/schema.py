"""The schema of the chart's values: `python deploy/helm/schema.py` writes dualmap/values.schema.json; `make docs` too.

The chart's own names and types are those of dualmap/values.yaml. The section `fleet` has the schema of the settings
themselves, so that Helm refuses a misspelt setting before anything is changed in the cluster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dualmap.cli.settings import Settings

CHART = Path(__file__).parent / "dualmap"

OPEN = {
    "affinity",
    "annotations",
    "commonLabels",
    "labels",
    "nodeSelector",
    "podAnnotations",
    "podLabels",
    "podSecurityContext",
    "resources",
    "securityContext",
}
"""Mappings that Kubernetes defines, or their author; their contents are not checked here."""

NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"}
DIGEST = {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"}
PULL_SECRET: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        },
    ]
}
"""The name of a Secret, alone or as Kubernetes and other charts write it."""
CHOICES = {
    "pullPolicy": ["Always", "IfNotPresent", "Never"],
    "engine.autoscaling.kind": ["none", "fleet", "hpa", "keda"],
    "pickers.autoscaling.kind": ["none", "hpa"],
    "autoscaling.kind": ["none", "hpa", "keda"],
    "service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "httpRoute.backend": ["routers", "inferencePool"],
    "inferencePool.failureMode": ["FailOpen", "FailClose"],
}
ENGINE: dict[str, Any] = {
    "name": "",
    "pool": "",
    "role": "",
    "kind": "",
    "replicas": 0,
    "image": "",
    "pullPolicy": "",
    "command": [],
    "args": [],
    "port": 0,
    "extraPorts": [],
    "env": [],
    "envFrom": [],
    "serviceAccountName": "",
    "extraContainers": [],
    "extraInitContainers": [],
    "resources": {},
    "sharedMemory": "",
    "startupSeconds": 0,
    "preStopSeconds": 0,
    "graceSeconds": 0,
    "autoscaling": {"kind": "", "min": 0, "max": 0, "prometheusUrl": ""},
    "podLabels": {},
    "podAnnotations": {},
    "podSecurityContext": {},
    "securityContext": {},
    "extraVolumes": [],
    "extraVolumeMounts": [],
    "nodeSelector": {},
    "tolerations": [],
    "affinity": {},
    "topologySpreadConstraints": [],
    "priorityClassName": "",
    "runtimeClassName": "",
}
"""The fields of an entry of `engines`, with a value of each one's type."""

AMOUNT = r"^[0-9][0-9_]*(\.[0-9]+)?[kKMG]?$"
TEMPLATE = r"\{\{.*\}\}"
_TYPES: dict[type, str] = {str: "string", bool: "boolean", int: "integer", float: "number"}


def described(value: object, path: str = "") -> dict[str, Any]:
    """The schema of a value like this one: mappings have these names and no others."""
    name = path.rpartition(".")[2]
    for ending, choices in CHOICES.items():
        if f".{path}".endswith(f".{ending}"):
            return {"enum": choices}
    if name == "digest":
        return DIGEST
    if isinstance(value, list):
        return {"type": "array"} | ({"items": PULL_SECRET} if name == "pullSecrets" else {})
    if not isinstance(value, dict):
        return {"type": _TYPES[type(value)]} | ({"minimum": 0} if type(value) in (int, float) else {})
    if name in OPEN:
        return {"type": "object"}
    properties = {key: described(each, f"{path}.{key}".lstrip(".")) for key, each in value.items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_schema() -> dict[str, Any]:
    """The schema of the settings file, its definitions included. Secrets are in it: templates/_checks.tpl refuses them
    with words, and a schema has none."""
    schema: dict[str, Any] = for_chart(Settings.model_json_schema(ref_template="#/$defs/{model}"))
    return schema


def for_chart(schema: Any) -> Any:
    """A schema of pydantic as the chart has it: without titles, without defaults, which Helm would not use, and with a
    template allowed wherever a text must have a form, as the chart renders the settings file."""
    if isinstance(schema, list):
        return [for_chart(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            found[key] = {name: with_amounts(name, for_chart(each)) for name, each in value.items()}
        elif key == "pattern":
            found[key] = f"({value})|{TEMPLATE}"
        elif key not in ("title", "default"):
            found[key] = for_chart(value)
    return found


def with_amounts(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a setting, which may be written as 100k or 2M where it is a count of tokens."""
    kinds = {schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))}
    if "tokens" not in name or "integer" not in kinds:
        return schema
    described = {"description": schema.pop("description")} if "description" in schema else {}
    return {"anyOf": [schema, {"type": "string", "pattern": AMOUNT}], **described}


def engine_schema() -> dict[str, Any]:
    schema = described(ENGINE, "engine")
    schema["required"] = ["name"]
    schema["properties"] |= {
        "name": NAME,
        "role": {"enum": ["mixed", "prefill", "decode"]},
        "kind": {"enum": ["StatefulSet", "Deployment"]},
    }
    return schema


def values_schema() -> dict[str, Any]:
    """The schema of the chart's values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    fleet = settings_schema()
    schema = described(values)
    schema["properties"] |= {
        "fleet": {key: value for key, value in fleet.items() if key != "$defs"},
        "engines": {"type": "array", "items": engine_schema()},
        "global": {"type": "object"},  # which Helm hands to every chart
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "$defs": fleet["$defs"], **schema}


def text() -> str:
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(text(), "utf-8")
