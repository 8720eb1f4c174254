"""`scripts/up` and `scripts/test` make their environment: once, one at a time, and again if it was left half-made.

The interpreter is one that makes environments in no time and can be held up at any step.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEADLINE_S = 60.0

# Writes down what it is asked for; holds on at a step for as long as there is a file hold-STEP.
PYTHON = """#!/bin/sh
at() {
    echo "$1" >>"$FAKE/steps"
    while [ -e "$FAKE/hold-$1" ]; do sleep 0.02; done
}
for last in "$@"; do :; done
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m venv"*)
        mkdir -p "$last/bin"
        echo >"$last/pyvenv.cfg"
        cp "$0" "$last/bin/python"
        at venv
        echo >"$last/pip" ;;
    "-m pip --python"*) ;;
    "-m pip --version") [ -e "${0%/bin/python}/pip" ] ;;
    "-m pip install"*)
        at install
        echo "$last" >>"$FAKE/asked"
        cp "$0" "${0%/python}/dualmap" ;;
    "up "*)
        at fleet
        echo "dualmap $*" ;;
    *) exec "$REAL_PYTHON" "$@" ;;
esac
"""

# What a shell starts in the background ignores Ctrl-C, and so does all that it starts.
INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Project:
    """A copy of the scripts, with an interpreter of the test's."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.venv = self.root / ".venv"
        self.fake = folder / "fake"
        self.fake.mkdir()
        shutil.copytree(SCRIPTS, self.root / "scripts")
        self.pyproject = self.root / "pyproject.toml"
        self.pyproject.write_text("[project]\n")
        python = self.fake / "python"
        python.write_text(PYTHON)
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        self.environment = {
            "PATH": os.environ["PATH"], "HOME": str(folder), "PYTHON": str(python),
            "FAKE": str(self.fake), "REAL_PYTHON": sys.executable,
        }  # fmt: skip
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """A script, by default `scripts/up`, in a process group of its own, as a terminal has it."""
        script, *options = words or ("up", "--port", "0")
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, self.root / "scripts" / script, *options],
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self._started.append(process)
        return process

    def run(self, *words: str, **environment: str) -> str:
        """What a script prints, by default `scripts/up`, which ends well."""
        process = self.start(*words, **environment)
        output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
        return output

    def steps(self) -> list[str]:
        steps = self.fake / "steps"
        return steps.read_text().split() if steps.exists() else []

    def made(self) -> list[str]:
        """The steps, without those of fleets that run."""
        return [step for step in self.steps() if step != "fleet"]

    def hold(self, step: str) -> Path:
        gate = self.fake / f"hold-{step}"
        gate.touch()
        return gate

    def until(self, step: str, count: int = 1) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.steps().count(step) < count:
            assert time.monotonic() < deadline_s, self.steps()
            time.sleep(0.02)

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    project = Project(tmp_path)
    yield project
    project.end()


def test_an_environment_is_made_once_and_installed_again_when_the_project_changed(project: Project) -> None:
    assert project.run().endswith("dualmap up --port 0\n")
    assert project.run() == "dualmap up --port 0\n"
    assert project.made() == ["venv", "install"]

    project.pyproject.write_text("[project]\nname = 'other'\n")
    assert "Installing into" in project.run()
    assert project.made() == ["venv", "install", "install"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    ("step", "then"), [("venv", ["venv", "venv", "install"]), ("install", ["venv", "install", "install"])]
)
def test_a_run_that_is_interrupted_leaves_nothing_that_the_next_trips_over(
    project: Project, step: str, then: list[str], how: signal.Signals
) -> None:
    gate = project.hold(step)
    interrupted = project.start()
    project.until(step)
    os.killpg(interrupted.pid, how)
    interrupted.communicate(timeout=DEADLINE_S)
    gate.unlink()

    assert project.run().endswith("dualmap up --port 0\n")

    assert project.made() == then
    assert project.run() == "dualmap up --port 0\n"


def test_an_install_that_is_interrupted_does_not_count_when_the_project_is_as_before(project: Project) -> None:
    project.run()
    before = project.pyproject.read_text()
    project.pyproject.write_text("[project]\nname = 'other'\n")
    gate = project.hold("install")
    interrupted = project.start()
    project.until("install", 2)
    os.killpg(interrupted.pid, signal.SIGINT)
    interrupted.communicate(timeout=DEADLINE_S)
    gate.unlink()
    project.pyproject.write_text(before)

    project.run()

    assert project.made() == ["venv", "install", "install", "install"]


def test_a_command_has_the_extra_that_it_needs_installed_once_and_beside_others(project: Project) -> None:
    for extra in ("site", "evaluation", "site", "evaluation", ""):
        assert project.run("with", extra, "dualmap", "up", "now").endswith("dualmap up now\n")
    project.run()

    assert project.made() == ["venv", "install", "install"]
    asked = (project.fake / "asked").read_text().splitlines()
    assert [line.rpartition("/project")[2] for line in asked] == ["[site]", "[evaluation]"]


@pytest.mark.parametrize("step", ["venv", "install"])
def test_two_first_runs_at_once_make_one_environment(project: Project, step: str) -> None:
    gate = project.hold(step)
    first = project.start()
    project.until(step)
    second = project.start()
    assert second.stdout is not None
    assert second.stdout.readline() == f"Waiting for another run that makes {project.venv}\n"

    gate.unlink()

    for run in (first, second):
        output, _ = run.communicate(timeout=DEADLINE_S)
        assert output.endswith("dualmap up --port 0\n")
    assert project.made() == ["venv", "install"]


def test_a_fleet_that_runs_holds_up_no_other_run(project: Project) -> None:
    gate = project.hold("fleet")
    running = project.start()
    project.until("fleet")
    project.pyproject.write_text("[project]\nname = 'other'\n")

    project.start()

    project.until("fleet", 2)
    assert project.steps() == ["venv", "install", "fleet", "install", "fleet"]
    gate.unlink()
    assert "dualmap up" in running.communicate(timeout=DEADLINE_S)[0]


def test_an_environment_without_pip_is_made_again(project: Project) -> None:
    project.run()
    (project.venv / "pip").unlink()
    (project.venv / ".installed-").unlink()

    project.run()

    assert project.made() == ["venv", "install", "venv", "install"]


def test_a_folder_that_is_no_environment_is_left_alone(project: Project, tmp_path: Path) -> None:
    letters = tmp_path / "letters"
    letters.mkdir()
    (letters / "to-a-friend").write_text("hello")

    process = project.start(DUALMAP_VENV=f"{letters}/")
    output, _ = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == 2
    assert f"{letters} is no Python environment" in output
    assert (letters / "to-a-friend").read_text() == "hello"
