"""The pages for operators name only what exists; those of metrics and errors, all of it."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from dualmap.router.errors import RouterError
from dualmap.router.http.heads import FLEET_FIELDS
from dualmap.router.http.paths import INFERENCE_PATHS, PASSTHROUGH_PATHS
from dualmap.router.prompts.inference_request import SCHEDULED_PATHS
from dualmap.scheduling.placing.decision import Reason
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from dualmap.workers.metrics import WorkerMetrics
from tests.support.metric_names import existing_metrics, router_registry

DOCS = Path(__file__).resolve().parents[1] / "docs"
OPERATE = sorted((DOCS / "operate").glob("*.md"))
PATHS = DOCS / "reference" / "http.md"

Family = tuple[str, str, tuple[str, ...]]
"""Name, type and labels."""


def families(registry: CollectorRegistry) -> set[Family]:
    """Every metric as the page has it; those of prometheus_client have their labels at the instrument alone."""
    labels = {
        instrument._name: instrument._labelnames
        for instrument in registry._collector_to_names
        if isinstance(instrument, MetricWrapperBase)
    }
    return {
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            tuple(labels.get(family.name) or getattr(family, "_labelnames", ())),
        )
        for family in registry.collect()
    }


def rows(page: str) -> list[list[str]]:
    """The cells of a page's tables, headings left out, and tables of three columns, which say where things are in the
    code."""
    lines = [line for line in (DOCS / "reference" / page).read_text().splitlines() if line.startswith("| ")]
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if not line.startswith(("| ---", "| metric |", "| status |"))
    ]
    return [row for row in cells if len(row) > 3]


def test_the_page_of_metrics_has_every_metric_with_its_type_and_labels() -> None:
    listed = [
        (name.strip("`"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows("metrics.md")
    ]

    assert len(listed) == len(set(listed))
    assert set(listed) == families(router_registry()) | families(WorkerMetrics().registry)


@pytest.mark.parametrize(
    ("metric", "values"),
    [("dualmap_requests_total", Outcome), ("dualmap_retries_total", FailureKind), ("dualmap_decisions_total", Reason)],
)
def test_the_page_of_metrics_has_every_value_of_a_label(metric: str, values: type[StrEnum]) -> None:
    meaning = next(meaning for name, _kind, _labels, meaning in rows("metrics.md") if name == f"`{metric}`")

    assert set(values) - set(re.findall(r"`(\w+)`", meaning)) == set()


def test_the_page_of_errors_has_every_code_with_its_status_and_type() -> None:
    kinds: list[type[RouterError]] = [RouterError, *RouterError.__subclasses__()]
    listed = [
        (int(status), code.strip("`"), kind.strip("`")) for status, code, kind, _when, _remedy in rows("errors.md")
    ]

    assert sorted(listed) == sorted((kind.status, kind.code, kind.type) for kind in kinds)
    assert all(remedy for *_, remedy in rows("errors.md"))


def test_the_page_of_paths_says_of_every_path_what_becomes_of_it() -> None:
    table = dict(re.findall(r"^\| (scheduled|passed on|the router's own) \| (.*?) \|", PATHS.read_text(), re.MULTILINE))
    listed = {what: set(re.findall(r"`([^` ]+)`", paths)) for what, paths in table.items()}

    assert listed["scheduled"] == SCHEDULED_PATHS
    assert listed["passed on"] == PASSTHROUGH_PATHS
    assert listed["the router's own"].isdisjoint(INFERENCE_PATHS)


def test_the_page_of_paths_has_every_header_about_the_fleet() -> None:
    of_answers = PATHS.read_text().partition("| header of an answer |")[2]
    listed = re.findall(r"^\| `(x-dualmap-[a-z-]+)` \|", of_answers, re.MULTILINE)

    assert sorted(listed) == sorted(field.decode() for field in FLEET_FIELDS)


def test_every_metric_on_the_pages_for_operators_exists() -> None:
    named = {name for page in OPERATE for name in re.findall(r"\bdualmap_[a-z_]+", page.read_text())}

    assert len(named) > 20
    assert named - existing_metrics() == set()
