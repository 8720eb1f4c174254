"""A fleet that changes its size itself, with real processes: spares join where instances are missing, whoever leads."""

from __future__ import annotations

from pathlib import Path

from fleet_process import Fleet, running_fleet, until

ELASTIC = ("--autoscale", "2:3", "--replicas", "1", "--workers", "2", "--time-scale", "20")


def ready(fleet: Fleet) -> set[str]:
    return {name for name, known in fleet.instances().items() if known["state"] == "ready"}


def inspect(fleet: Fleet, view: str) -> str:
    return fleet.dualmap("inspect", view, "--store.url", fleet.store_url)


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
        leader = next(name for name in ("worker-1", "worker-2") if name in inspect(fleet, "overview"))
        fleet.kill(leader)
        until(lambda: leader not in inspect(fleet, "overview").partition("leader:")[2], "another one leads")
        assert ready(fleet) == {"instance-2", "instance-3"}
        assert "decision 1 " in inspect(fleet, "scaling")
