"""Dashboards and alert rules name what exists, and say what the documents say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import yaml

from tests.support.metric_names import existing_metrics

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
BUILD = ROOT / "deploy" / "grafana" / "build.py"
PAGE = ROOT / "docs" / "operate" / "monitoring.md"
_ROW = re.compile(r"^\| ([\w ]+) \| `(.+?)`(?: for (\d+) ([sm]))? \| .+ \|$", re.MULTILINE)


def test_the_dashboards_are_what_their_source_says() -> None:
    files = runpy.run_path(str(BUILD))["files"]()

    assert {path.name for path in (BUILD.parent / "dashboards").glob("*.json")} == {path.name for path in files}
    for path, text in files.items():
        assert path.read_text("utf-8") == text, "run: make docs"


def test_the_dashboards_and_rules_name_metrics_that_exist() -> None:
    texts = [path.read_text("utf-8") for path in (ALERTS, *(BUILD.parent / "dashboards").glob("*.json"))]
    named = {name for text in texts for name in re.findall(r"\bdualmap_[a-z_]+", text)}

    assert len(named) > 30
    assert named - existing_metrics() == set()


def test_every_alert_of_the_page_is_a_rule_and_every_rule_is_on_the_page() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    told = {
        (name, expression.replace("\\|", "|"), f"{time}{unit}" if time else None)
        for name, expression, time, unit in _ROW.findall(PAGE.read_text("utf-8"))
        if "dualmap_" in expression
    }

    assert {(rule["annotations"]["summary"], rule["expr"], rule.get("for")) for rule in rules} == told
    assert len(told) > 15
    assert {rule["labels"]["severity"] for rule in rules} <= {"critical", "warning", "info"}


def test_every_dashboard_has_panels_with_queries() -> None:
    for path in (BUILD.parent / "dashboards").glob("*.json"):
        dashboard = json.loads(path.read_text("utf-8"))
        assert len(dashboard["panels"]) >= 8
        assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])


def test_every_alert_waits_names_whom_it_is_about_and_leads_to_its_section_of_the_runbook() -> None:
    runbook = (ROOT / "docs" / "operate" / "runbook.md").read_text("utf-8")
    sections = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.+)$", runbook, re.MULTILINE)}
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]

    for rule in rules:
        page, _, section = rule["annotations"]["runbook_url"].partition("#")
        assert "for" in rule, rule["alert"]
        assert (page, section in sections) == ("docs/operate/runbook.md", True), rule["alert"]
        outermost = re.match(r"(?:max|sum|histogram_quantile\([\d.]+, sum) by \(([\w, ]+)\)", rule["expr"])
        for label in outermost[1].split(", ") if outermost else ():
            assert (
                label == "le"
                or f"$labels.{label}" in rule["annotations"]["description"]
                or ("histogram" in rule["expr"] and label == "pool")
            ), rule["alert"]
    assert len(sections) == len(rules)
