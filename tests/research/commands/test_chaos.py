"""A whole run: a fleet, faults, a verdict and a table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualmap.cli.chaos import with_short_times
from dualmap.cli.settings import Settings
from dualmap.research.commands.chaos import scenarios_of
from dualmap.simulation.commands.options import OptionError
from dualmap.workers.settings import WorkerSettings

WITHIN_S = 300.0
IN_CI = ("engine-dead", "router-killed", "store-empty", "engine-reset")


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dualmap", "chaos", *words]
    wide = os.environ | {"COLUMNS": "400"}
    return subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False, env=wide)


@pytest.mark.timeout(WITHIN_S + 10)
def test_a_fleet_comes_through_an_engine_a_router_and_the_store_that_die(tmp_path: Path) -> None:
    done = chaos("--scenario", ",".join(IN_CI), "--rate", "6", "--keep", str(tmp_path))

    assert done.returncode == 0, done.stdout + done.stderr
    rows = {words[0]: words for line in done.stdout.splitlines() if (words := line.split())}
    assert set(IN_CI) <= rows.keys()
    assert all(rows[name][-1] == "yes" for name in IN_CI)
    assert int(rows["all"][1]) > 20, "requests were sent"
    assert int(rows["all"][3]) == 0, "none was wrong"


def test_an_unknown_scenario_is_named_with_the_one_that_is_like_it() -> None:
    with pytest.raises(OptionError, match="did you mean engine-dead"):
        scenarios_of(["router-killed,engine-ded"], [])


def test_leases_are_short_unless_they_are_set() -> None:
    settings = with_short_times(Settings(worker=WorkerSettings(lease_s=7.0)))

    assert settings.worker.lease_s == 7.0
    assert settings.worker.stall_down_s < WorkerSettings().stall_down_s
    assert settings.emulator.stream_interval > 1
