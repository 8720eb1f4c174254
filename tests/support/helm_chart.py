"""The chart, rendered by Helm's own code."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "dualmap"
EXAMPLES = {path.stem.removeprefix("values-"): path for path in sorted(CHART.glob("values-*.yaml"))}
NAME, NAMESPACE = "dualmap", "llm"

Manifest = dict[str, Any]
Values = dict[str, Any]


def example(name: str) -> Values:
    """The values of an example file."""
    values: Values = yaml.safe_load(EXAMPLES[name].read_text("utf-8"))
    return values


def lint(values: Values) -> list[str]:
    """What Helm's linter warns of or refuses."""
    severity_of_a_warning = 2
    messages = helm_python.lint(CHART, values)["messages"]
    return [f"{each['path']}: {each['error']}" for each in messages if each["severity"] >= severity_of_a_warning]


def texts(values: Values) -> dict[str, str]:
    """The text of each template, by its path.

    Raises:
        helm_python.HelmValuesError: the schema refuses the values.
    """
    return dict(_texts(json.dumps(values)))


@functools.cache
def _texts(values: str) -> dict[str, str]:
    with helm_python.Chart.load(CHART) as chart:
        return chart.render(json.loads(values), name=NAME, namespace=NAMESPACE)


def manifests(values: Values) -> list[Manifest]:
    """All objects that the chart makes of the values."""
    files = [text for path, text in sorted(texts(values).items()) if path.endswith(".yaml")]
    return [each for text in files for each in yaml.safe_load_all(text) if each]


def of_kind(objects: list[Manifest], *kinds: str) -> list[Manifest]:
    return [each for each in objects if each["kind"] in kinds]


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


def pods(objects: list[Manifest]) -> dict[str, Manifest]:
    """The pod templates of all workloads, by the workload's name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"] for each in of_kind(objects, "Deployment", "StatefulSet")
    }
