"""The folder of a fleet: gone at the end, kept for its logs after a failure, swept up after a killed owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.cli.fleet_folder import (
    CONFIG,
    STORE_SOCKET,
    fleet_folder,
    fleet_of_this_machine,
    running_fleets,
    write_pid,
)

OWNER = """
import sys, time
from pathlib import Path
from dualmap.cli.fleet_folder import fleet_folder
with fleet_folder(Path(sys.argv[1])) as folder:
    (folder / "router-1.log").write_text("hello")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder of a short name, as a socket's path has to fit."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_folder_is_for_its_user_alone_and_gone_at_the_end(parent: Path) -> None:
    with fleet_folder(parent) as folder:
        assert folder.parent == parent
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "router-1.log").write_text("hello")

    assert list(parent.iterdir()) == []


def test_after_a_failure_logs_are_kept_and_named(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), fleet_folder(parent) as folder:
        (folder / "router-1.log").write_text("it broke")
        raise RuntimeError

    assert f"logs are in {folder}" in capsys.readouterr().err
    with fleet_folder(parent):  # the next fleet leaves them alone
        assert [path.name for path in folder.iterdir()] == ["router-1.log"]


def test_after_a_failure_an_empty_folder_goes(parent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), fleet_folder(parent):
        raise RuntimeError

    assert list(parent.iterdir()) == []
    assert capsys.readouterr().err == ""


def test_what_a_killed_owner_left_behind_is_removed_by_the_next_and_what_a_living_one_has_is_not(parent: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        left = Path(owner.stdout.readline().strip())
        with fleet_folder(parent):
            assert (left / "router-1.log").exists()
        owner.kill()
        owner.wait()
    assert (left / "router-1.log").exists()

    with fleet_folder(parent) as folder:
        assert list(parent.iterdir()) == [folder]


def test_where_a_sockets_path_would_be_too_long_the_folder_is_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()

    with fleet_folder(deep) as folder:
        assert len(bytes(folder / STORE_SOCKET)) <= 103
        assert list(deep.iterdir()) == []


def test_a_reader_of_a_process_id_never_sees_half_a_file(tmp_path: Path) -> None:
    write_pid(tmp_path, "router-1", 41)
    with (tmp_path / "router-1.pid").open() as reader:
        write_pid(tmp_path, "router-1", 42)
        assert reader.read() == "41\n"  # the file that it opened is left as it was
    assert (tmp_path / "router-1.pid").read_text() == "42\n"
    assert [path.name for path in tmp_path.iterdir()] == ["router-1.pid"]


def test_a_command_that_names_no_fleet_means_the_youngest_that_runs(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    assert fleet_of_this_machine().config is None
    assert "no fleet of 'dualmap up' runs" in fleet_of_this_machine().if_failed

    with fleet_folder() as older, fleet_folder() as younger:
        for age_s, folder in ((20, older), (10, younger)):
            (folder / CONFIG).write_text(json.dumps({"router": {"port": 8000 + age_s}}))
            stamp = time.time() - age_s
            os.utime(folder / CONFIG, (stamp, stamp))
        with fleet_folder():  # it has not written its settings yet
            found = fleet_of_this_machine()

        assert found.config == younger / CONFIG
        assert "2 fleets run on this machine, and this is the youngest (port 8010, started at " in found.choice
        assert f"--config {older / CONFIG}   (port 8020, started at " in found.choice
        assert running_fleets() == [younger / CONFIG, older / CONFIG]


def test_where_one_fleet_runs_there_is_no_choice(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with fleet_folder() as folder:
        (folder / CONFIG).write_text("{}")

        assert fleet_of_this_machine().config == folder / CONFIG
        assert fleet_of_this_machine().choice == ""


def test_a_fleet_that_was_killed_is_not_meant(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    with subprocess.Popen([sys.executable, "-c", OWNER, str(parent)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        (folder / CONFIG).write_text("{}")
        assert running_fleets() == [folder / CONFIG]
        owner.kill()

    assert running_fleets() == []
