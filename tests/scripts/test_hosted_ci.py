"""Hosted CI and pre-commit run the same checks as scripts/test, and CI tries what is released."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKS = re.findall(r'^    "\$venv/bin/(.+)"?$', (ROOT / "scripts" / "test").read_text("utf-8"), re.MULTILINE)


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))["jobs"]
    return found


def commands(jobs: dict[str, Any]) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_hosted_ci_runs_every_check_on_every_supported_python_and_tries_what_is_released() -> None:
    jobs = workflow("ci.yml")

    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    tried = {
        "scripts/test", "make coverage", "scripts/test-lowest",
        "scripts/check-upgrade", "scripts/check-release --image",
    }  # fmt: skip
    assert tried <= set(commands(jobs))


def test_the_lowest_dependencies_are_tried_on_the_lowest_python() -> None:
    lowest = re.findall(r'^requires-python = ">=(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    [python] = [
        step["with"] for step in workflow("ci.yml")["lowest"]["steps"] if "setup-python" in step.get("uses", "")
    ]

    assert [python["python-version"]] == lowest


def test_a_release_publishes_what_was_tried_under_its_tag_and_nothing_before() -> None:
    jobs = workflow("release.yml")
    published = ["package", "image"]

    assert 'scripts/check-release --image --tag "$GITHUB_REF_NAME"' in commands(jobs)
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None, "wheels": "build", "package": ["build", "wheels"], "image": "build",
    }  # fmt: skip
    (wheels,) = (step for step in jobs["wheels"]["steps"] if "cibuildwheel" in step.get("run", ""))
    assert wheels["run"].endswith("dist/*.tar.gz"), "of what was tried"
    assert "import NATIVE" in wheels["env"]["CIBW_TEST_COMMAND"]
    assert not any("build" in command for name in published for command in commands({name: jobs[name]}))
    assert jobs["package"]["permissions"] == {"id-token": "write"}, "trusted publishing keeps no secret"


def test_what_runs_the_release_before_has_the_tags() -> None:
    jobs = [
        job
        for name in ("ci.yml", "release.yml")
        for job in workflow(name).values()
        if any("check-upgrade" in step.get("run", "") for step in job["steps"])
    ]

    assert [job["steps"][0]["with"]["fetch-depth"] for job in jobs] == [0, 0]


def test_hosted_ci_runs_the_tests_by_the_python_of_its_matrix() -> None:
    steps = workflow("ci.yml")["test"]["steps"]
    [tests] = [step for step in steps if step.get("run") == "scripts/test"]

    assert tests["env"] == {"PYTHON": "python"}, "else scripts/test takes the newest Python of the runner"


def test_pre_commit_runs_the_checks_of_scripts_test() -> None:
    configuration = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    hooks = [hook for repository in configuration["repos"] for hook in repository["hooks"]]
    entries = {" ".join([hook["entry"], *hook.get("args", [])]) for hook in hooks}

    assert {check.replace('"', "").split()[0] for check in CHECKS} >= {"ruff", "mypy"}
    for check in ("ruff check .", "ruff format --check .", "mypy"):
        assert f".venv/bin/{check}" in entries


def test_coverage_is_of_the_branches_of_every_package_and_may_not_sink() -> None:
    coverage = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["coverage"]

    assert coverage["run"]["branch"]
    assert coverage["run"]["source"] == ["dualmap"]
    assert coverage["report"]["fail_under"] > 80
