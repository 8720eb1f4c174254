"""Instances come and go while the fleet runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.cli.main import main
from tests.fleet.fleet_process import Fleet, emulated, running_fleet, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet that stays within the pair: the default policy would find the prompts where they were before."""
    words = ("--policy", "dualmap", "--replicas", "2", "--workers", "1", "--time-scale", "20")
    with running_fleet(tmp_path_factory.mktemp("members"), words) as started:
        yield started


def placements(fleet: Fleet, count: int = 40) -> dict[int, str]:
    """Where prompts with different prefixes go, by their number."""
    rest = "the rest of the first block is the same in all of them " * 12
    return {number: fleet.placement(f"{number:04d} {rest}") for number in range(count)}


def test_an_instance_is_added_drained_resumed_and_removed(fleet: Fleet, tmp_path: Path) -> None:
    def dualmap(*words: str) -> str:
        return fleet.dualmap("instances", *words, "--url", fleet.endpoint)

    def state() -> str | None:
        return fleet.instances().get("fifth", {}).get("state")

    with emulated(tmp_path / "emulator.log") as ((url,), _):
        before = placements(fleet)

        dualmap("add", "fifth", url, "--kv-capacity-tokens", "500000")
        until(lambda: state() == "ready", "it is ready")
        with_it = placements(fleet)
        moved = {number for number in before if before[number] != with_it[number]}
        assert "fifth" in dualmap("list")
        assert any(instance == "fifth" for instance in with_it.values())
        assert len(moved) < len(before) / 2  # keys next to its anchor points, not all of them

        dualmap("drain", "fifth")
        until(lambda: state() == "standby", "it is drained")
        assert "fifth" not in placements(fleet).values()

        dualmap("resume", "fifth")
        until(lambda: state() == "ready", "it is back")

        dualmap("remove", "fifth")
        assert state() is None
        assert "fifth" not in placements(fleet).values()


def test_an_instance_that_nobody_knows_is_an_error_that_names_it(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["instances", "drain", "nobody", "--url", fleet.endpoint]) == 2
    assert "'nobody'" in capsys.readouterr().err
