"""Which instance serves which model name, on real processes: served names and adapters come and go while it runs."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fleet_process import Fleet, emulated, running_fleet, until


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    words = ("--replicas", "2", "--workers", "1", "--instances", "2", "--worker.health_interval_s", "0.3")
    with running_fleet(tmp_path_factory.mktemp("names"), words) as started:
        yield started


@pytest.fixture
def leaderless(fleet: Fleet) -> Iterator[Fleet]:
    """The fleet while its only worker stands still, so that no leader reads what instances list."""
    worker = fleet.pid("worker-1")
    os.kill(worker, signal.SIGSTOP)
    yield fleet
    os.kill(worker, signal.SIGCONT)


@pytest.fixture
def other(fleet: Fleet, tmp_path: Path) -> Iterator[str]:
    """A member of the fleet whose engine has another model."""
    names = ("--emulator.model", "llama", "--emulator.aliases", '["llama-8b"]')
    with emulated(tmp_path / "emulator.log", *names) as ((url,), _):
        fleet.dualmap("instances", "add", "other", url, "--url", fleet.endpoint)
        until(lambda: fleet.instances()["other"]["state"] == "ready", "it is ready")
        yield "other"
        fleet.dualmap("instances", "remove", "other", "--url", fleet.endpoint)


def post(url: str, body: dict[str, Any], method: str = "POST") -> tuple[int, str, bytes]:
    """Status, instance, body; over a connection of its own, so of any replica."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, str(answer.headers["x-dualmap-instance"]), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, str(error.headers["x-dualmap-instance"]), error.read()


def served_by(fleet: Fleet, model: str, count: int = 40, path: str = "/v1/completions") -> set[tuple[int, str]]:
    """Status and instance of so many requests for the name, all of other prompts."""
    asked = {"model": model, "max_tokens": 1, "prompt": "", "input": ""}
    return {
        post(f"{fleet.endpoint}{path}", {**asked, "prompt": f"{n} {path}", "input": f"{n} {path}"})[:2]
        for n in range(count)
    }


def known(fleet: Fleet, model: str) -> bool:
    """Whether every replica knows the name: each new connection may reach another one."""
    return all(model in {card["id"] for card in fleet.get("/v1/models")["data"]} for _ in range(12))


def test_an_instance_without_the_model_gets_none_of_its_requests_and_its_own_names_are_served(
    fleet: Fleet, other: str
) -> None:
    until(lambda: known(fleet, "llama-8b"), "the other model is known")

    for path in ("/v1/completions", "/v1/embeddings"):
        assert served_by(fleet, fleet.model, path=path) == {(200, "instance-1"), (200, "instance-2")}
        assert served_by(fleet, "llama", 10, path) == served_by(fleet, "llama-8b", 10, path) == {(200, other)}
    assert "and not the pool's model" in fleet.instances()[other]["trouble"]
    assert "llama, llama-8b" in fleet.dualmap("instances", "list", "--url", fleet.endpoint).replace("\n", " ")


def test_an_adapter_that_one_instance_loads_is_served_by_that_one_within_seconds_and_until_it_is_unloaded(
    fleet: Fleet,
) -> None:
    url = fleet.instances()["instance-1"]["url"]
    assert served_by(fleet, "sql", 4) == {(404, "None")}

    assert post(f"{url}/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": "/adapters/sql"})[0] == 200
    until(lambda: known(fleet, "sql"), "all replicas know the adapter")

    assert served_by(fleet, "sql") == {(200, "instance-1")}
    assert served_by(fleet, fleet.model) == {(200, "instance-1"), (200, "instance-2")}
    (card,) = [card for card in fleet.get("/v1/models")["data"] if card["id"] == "sql"]
    assert card["parent"] == fleet.model

    assert post(f"{url}/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 200
    until(lambda: served_by(fleet, "sql", 6) == {(404, "None")}, "it is gone everywhere")


def test_an_adapter_that_is_loaded_through_a_router_is_served_by_all_replicas_at_once(leaderless: Fleet) -> None:
    adapter = {"lora_name": "sql", "lora_path": "/adapters/sql"}
    for _ in range(3):
        assert served_by(leaderless, "sql", 6) == {(404, "None")}

        assert post(f"{leaderless.endpoint}/v1/load_lora_adapter", adapter)[0] == 200
        assert served_by(leaderless, "sql", 12) <= {(200, "instance-1"), (200, "instance-2")}
        assert known(leaderless, "sql")

        assert post(f"{leaderless.endpoint}/v1/unload_lora_adapter", adapter)[0] == 200
        assert not any("sql" in {card["id"] for card in leaderless.get("/v1/models")["data"]} for _ in range(12))


def test_a_name_that_no_instance_lists_is_added_and_removed_while_the_fleet_runs(fleet: Fleet) -> None:
    names = f"{fleet.endpoint}/admin/models"
    assert post(names, {"name": "mine", "kind": "alias"})[0] == 201
    until(lambda: served_by(fleet, "mine") == {(200, "instance-1"), (200, "instance-2")}, "the alias is served")
    assert post(names, {"name": fleet.model})[0] == 409
    assert post(f"{names}/{fleet.model}", {}, "DELETE")[0] == 409

    assert post(f"{names}/mine", {}, "DELETE")[0] == 204
    until(lambda: served_by(fleet, "mine", 6) == {(404, "None")}, "it is gone everywhere")
    assert post(f"{names}/mine", {}, "DELETE")[0] == 404


def test_an_instance_that_cannot_be_reached_says_why(fleet: Fleet) -> None:
    fleet.dualmap("instances", "add", "nowhere", "http://no-such-host.invalid:8000", "--url", fleet.endpoint)
    try:
        until(lambda: fleet.instances()["nowhere"]["trouble"], "the reason is known")
        told = fleet.dualmap("instances", "list", "--url", fleet.endpoint)
        assert "'no-such-host.invalid' cannot be resolved" in told
    finally:
        fleet.dualmap("instances", "remove", "nowhere", "--url", fleet.endpoint)


def test_an_adapter_that_one_instance_drops_under_load_costs_no_request(fleet: Fleet) -> None:
    urls = {name: fleet.instances()[name]["url"] for name in ("instance-1", "instance-2")}
    for url in urls.values():
        post(f"{url}/v1/load_lora_adapter", {"lora_name": "law", "lora_path": "/adapters/law"})
    until(lambda: all("law" in each["models"] for each in fleet.instances().values()), "both list it")
    until(lambda: known(fleet, "law"), "all replicas know it")
    serving = served_by(fleet, "law")  # its home, or both where that was busy
    assert serving <= {(200, "instance-1"), (200, "instance-2")}
    home = min(instance for _, instance in serving)
    (other,) = urls.keys() - {home}

    post(f"{urls[home]}/v1/unload_lora_adapter", {"lora_name": "law"})

    assert served_by(fleet, "law", 60) == {(200, other)}
    assert served_by(fleet, fleet.model) == {(200, "instance-1"), (200, "instance-2")}
