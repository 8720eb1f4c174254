"""The examples work as they say."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dualmap.cli import own_policies
from dualmap.cli.configuration import ConfigurationError
from dualmap.cli.main import main
from dualmap.scheduling.placing.policies.registry import BUILDERS, add_policy
from dualmap.scheduling.scaling.scale_record import ScaleRecord
from dualmap.scheduling.settings import OWN_POLICIES, SchedulingSettings
from dualmap.workers.actuators import Webhook
from tests.support.ports import free_port

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
POLICY = EXAMPLES / "own_policy" / "short_first.py"


def loaded(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example's package, as if pip had installed it."""
    loaded(POLICY, "short_first")
    point = EntryPoint("short-first", "short_first:build", own_policies.GROUP)
    monkeypatch.setattr(own_policies, "entry_points", lambda group: [point])
    yield
    BUILDERS.pop("short-first", None)
    OWN_POLICIES.discard("short-first")
    sys.modules.pop("short_first", None)


@pytest.mark.usefixtures("installed")
def test_a_policy_of_ones_own_runs_by_its_name_without_touching_the_product(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "uniform", "--requests", "60", "--instances", "3", "--rate", "2"]

    assert main(["simulate", *words, "--policy", "short-first"]) == 0
    assert "short-first" in capsys.readouterr().out
    assert main(["settings", "--scheduling.policy", "short-first"]) == 0
    assert "policy: short-first" in capsys.readouterr().out
    assert len(POLICY.read_text().splitlines()) <= 40


def test_runs_in_processes_of_their_own_know_it_too(tmp_path: Path) -> None:
    described = tmp_path / "dualmap_short_first-0.1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: dualmap-short-first\nVersion: 0.1.0\n")
    (described / "entry_points.txt").write_text("[dualmap.policies]\nshort-first = short_first:unnamed\n")
    (tmp_path / "short_first.py").write_text(POLICY.read_text() + "\nunnamed = lambda *given: build(*given)\n")
    words = ["--trace", "uniform", "--requests", "60", "--instances", "3", "--rate", "2", "--workers", "2"]

    done = subprocess.run(
        [sys.executable, "-m", "dualmap", "simulate", *words, "--policy", "short-first,dualmap-least-cost"],
        env={**os.environ, "PYTHONPATH": f"{EXAMPLES.parent}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "short-first" in done.stdout
    assert "dualmap-least-cost" in done.stdout


def test_a_policy_that_nobody_installed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--scheduling.policy", "short-first"]) == 2
    assert "scheduling.policy" in capsys.readouterr().err
    with pytest.raises(ValueError, match="already"):
        add_policy("dualmap", lambda name, settings: None)  # type: ignore[return-value]
    assert SchedulingSettings().policy not in OWN_POLICIES


def test_a_policy_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("broken", "no_such_module:build", own_policies.GROUP)
    monkeypatch.setattr(own_policies, "entry_points", lambda group: [point])

    with pytest.raises(ConfigurationError, match="policy 'broken' of entry point no_such_module:build"):
        own_policies.load_own_policies()


async def test_the_webhooks_receiver_acts_once_on_each_signed_decision() -> None:
    port = free_port()
    words = [sys.executable, str(EXAMPLES / "scaling_webhook.py"), str(port), "secret"]
    record = decision(size=2, wanted=4)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        try:
            await until_listening(port)
            replies = [await Webhook(f"http://127.0.0.1:{port}", "secret").call("p", record) for _ in range(2)]
            forged = await Webhook(f"http://127.0.0.1:{port}", "guess").call("p", decision(size=1, wanted=9))
        finally:
            process.terminate()
        assert process.stdout is not None
        printed = process.stdout.read()

    assert [reply.accepted for reply in replies] == [True, True]
    assert not forged.accepted
    assert printed == "start 2 machines\n"


def decision(**changes: Any) -> ScaleRecord:
    return ScaleRecord(decision_id=1, at_ms=5, **changes)


async def until_listening(port: int) -> None:
    import asyncio

    for _ in range(400):
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}", timeout=1)
        except urllib.error.HTTPError:
            return
        except OSError:
            await asyncio.sleep(0.05)
