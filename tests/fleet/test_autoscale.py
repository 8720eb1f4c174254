"""A fleet that changes its size itself, with real processes: spares join where some are missing, under any leader."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fleet_process import Fleet, running_fleet, until

from simulation.commands.replay import SOME_FAILED

ELASTIC = ("--autoscale", "2:3", "--replicas", "1", "--workers", "2", "--time-scale", "20")
CROWDED = ("--autoscale", "2:4", "--replicas", "2", "--workers", "1", "--time-scale", "20")
CROWD = ("--trace", "flashcrowd:factor=6,span_s=180", "--requests", "400", "--max-input-tokens", "20480")


def ready(fleet: Fleet) -> set[str]:
    return {name for name, known in fleet.instances().items() if known["state"] == "ready"}


def inspect(fleet: Fleet, view: str) -> str:
    return fleet.dualmap("inspect", view, "--store.url", fleet.store_url)


def leader_of(fleet: Fleet) -> str:
    """Id of the worker that leads, which a restart changes; "" while none does."""
    found = re.search(r"worker-\d-\w+", inspect(fleet, "overview").partition("leader:")[2])
    return found[0] if found else ""


def test_a_spare_joins_below_the_minimum_and_an_instance_that_an_operator_parked_does_not(tmp_path: Path) -> None:
    with running_fleet(tmp_path, ELASTIC) as fleet:
        assert ready(fleet) == {"instance-1", "instance-2"}
        assert fleet.instances()["instance-3"]["state"] == "standby"
        assert "no scaling decision yet" in inspect(fleet, "scaling")

        fleet.dualmap("instances", "drain", "instance-1", "--url", fleet.endpoint)

        until(lambda: ready(fleet) == {"instance-2", "instance-3"}, "the spare serves")
        told = until(lambda: "done" in (log := inspect(fleet, "scaling")) and log, "the decision is done")
        assert "1 of at least 2 instances; starts instance-3" in " ".join(told.split())

        # given the leader's death, the next one finds nothing to repeat
        leader = leader_of(fleet)
        fleet.kill(leader.rpartition("-")[0])
        until(lambda: leader_of(fleet) not in ("", leader), "another one leads, perhaps the same worker started again")
        assert ready(fleet) == {"instance-2", "instance-3"}
        assert "decision 1 " in inspect(fleet, "scaling")


def test_a_flash_crowd_brings_spares_in_and_its_end_parks_them_and_no_answer_is_lost_by_it(tmp_path: Path) -> None:
    with running_fleet(tmp_path, CROWDED) as fleet:
        report = tmp_path / "report.json"
        to_fleet = ("--url", fleet.endpoint, "--time-scale", "20", "--quiet", "--json", str(report))
        fleet.dualmap("replay", *CROWD, *to_fleet, exit_codes=(0, SOME_FAILED))  # the failures are judged below

        log = " ".join(inspect(fleet, "scaling").split())
        assert re.search(r"2 -> [34]: (crowd|overload)", log), log
        failures = json.loads(report.read_text())["failures"]
        assert failures.keys() <= {"status 429 queue_full"}, "a full queue may refuse, a change of the size may not"
        until(lambda: len(ready(fleet)) == 2, "those that joined, or others in their place, have left", 60)
