"""Hosted CI and pre-commit run the same checks as scripts/test."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKS = re.findall(r'^    "\$venv/bin/(.+)"?$', (ROOT / "scripts" / "test").read_text("utf-8"), re.MULTILINE)


def test_hosted_ci_runs_scripts_test_on_every_supported_python_and_builds_wheel_and_image() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    commands = "\n".join(step.get("run", "") for job in jobs.values() for step in job["steps"])

    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    for command in ("scripts/test", "python -m build", "docker build"):
        assert command in commands


def test_hosted_ci_runs_the_tests_by_the_python_of_its_matrix() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    [tests] = [step for step in jobs["test"]["steps"] if step.get("run") == "scripts/test"]

    assert tests["env"] == {"PYTHON": "python"}, "else scripts/test takes the newest Python of the runner"


def test_pre_commit_runs_the_checks_of_scripts_test() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repository in configuration["repos"] for hook in repository["hooks"]]
    entries = {" ".join([hook["entry"], *hook.get("args", [])]) for hook in hooks}

    assert {check.replace('"', "").split()[0] for check in CHECKS} >= {"ruff", "mypy"}
    for check in ("ruff check .", "ruff format --check .", "mypy"):
        assert f".venv/bin/{check}" in entries
