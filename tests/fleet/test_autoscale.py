"""A fleet that changes its size itself, with real processes: spares join where some are missing, under any leader."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from dualmap.simulation.commands.replay import SOME_FAILED
from tests.fleet.fleet_process import Fleet, emulated, running_fleet, until
from tests.support.ports import ports_in_a_row

ELASTIC = ("--autoscale", "2:3", "--replicas", "1", "--workers", "2", "--time-scale", "20")
CROWDED = ("--autoscale", "2:4", "--replicas", "2", "--workers", "1", "--time-scale", "20")
NOWHERE = "http://127.0.0.1:9"
"""An instance that never answers."""
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
        words = (*CROWD, "--time-scale", "20", "--quiet", "--json", str(report))
        fleet.replay(*words, exit_codes=(0, SOME_FAILED))  # the failures are judged below

        log = " ".join(inspect(fleet, "scaling").split())
        assert re.search(r"2 -> [34]: (crowd|overload)", log), log
        failures = json.loads(report.read_text())["failures"]
        assert failures.keys() <= {"status 429 queue_full"}, "a full queue may refuse, a change of the size may not"
        until(lambda: len(ready(fleet)) == 2, "those that joined, or others in their place, have left")


class Orders(ThreadingHTTPServer):
    """Takes decisions; its first caller gets no answer before ``answers`` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), OrderHandler)
        self.answers = threading.Event()
        self.keys: list[str] = []
        """One for each call."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class OrderHandler(BaseHTTPRequestHandler):
    server: Orders

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        signature = "sha256=" + hmac.new(b"secret", body, hashlib.sha256).hexdigest()
        assert self.headers["x-dualmap-signature"] == signature
        self.server.keys.append(self.headers["idempotency-key"])
        if len(self.server.keys) == 1:
            self.server.answers.wait(60)
        with contextlib.suppress(OSError):  # the first caller is dead
            self.send_response(204)
            self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def orders() -> Iterator[Orders]:
    with Orders() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


def settings_file(directory: Path, **pool: object) -> tuple[str, str]:
    path = directory / "given.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"name": "default", **pool}]}))
    return "--config", str(path)


def test_the_next_leader_repeats_a_call_of_which_the_dead_one_had_no_answer_with_the_same_key(
    tmp_path: Path, orders: Orders
) -> None:
    webhook = {"actuator": "webhook", "webhook_url": orders.url, "webhook_secret": "secret"}
    autoscale = {"min_instances": 2, "max_instances": 3, "start_s": 600, **webhook}
    given = settings_file(tmp_path, autoscale=autoscale)
    options = ("--instances", "1", "--replicas", "1", "--workers", "2")
    with running_fleet(tmp_path, (*given, *options)) as fleet, emulated(tmp_path / "emulators.log") as ((url,), _):
        until(lambda: orders.keys, "the webhook is called")
        fleet.kill(leader_of(fleet).rpartition("-")[0])
        until(lambda: len(orders.keys) > 1, "another leader calls it")

        fleet.dualmap("instances", "add", "started", url, "--url", fleet.endpoint)

        told = until(lambda: "done" in (log := inspect(fleet, "scaling")) and log, "the decision is done")
        assert ready(fleet) == {"instance-1", "started"}
        assert "decision 1 " in told
        assert len(set(orders.keys)) == 1, "the receiver tells a repetition by its key"


def test_a_spare_that_never_becomes_ready_is_parked_again_and_another_one_serves(tmp_path: Path) -> None:
    with emulated(tmp_path / "emulators.log", count=2, port=ports_in_a_row(2)) as ((first, other), _):
        instances = [
            {"id": "a", "url": first},
            {"id": "dead", "url": NOWHERE, "standby": True},
            {"id": "other", "url": other, "standby": True},
        ]
        autoscale = {"min_instances": 2, "max_instances": 3, "start_s": 20}
        given = settings_file(tmp_path, autoscale=autoscale, instances=instances)
        options = ("--replicas", "1", "--workers", "1", "--scheduling.time_scale", "20")
        with running_fleet(tmp_path, (*given, *options)) as fleet:
            until(lambda: ready(fleet) == {"a", "other"}, "the spare that answers serves")

            log = " ".join(until(lambda: "done" in (log := inspect(fleet, "scaling")) and log, "it is done").split())
            assert "starts dead" in log
            assert re.search(r"failed.* dead not ready", log), log
            assert fleet.instances()["dead"]["state"] == "standby"
