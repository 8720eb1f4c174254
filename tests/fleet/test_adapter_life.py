"""Adapters of a real fleet come and go, whatever dies meanwhile: nothing is lost, and nothing is stuck."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

PRESET = "qwen2.5-7b-910b4:adapter_slots=4+adapter_host_slots=16"
SLOW_LOAD_S = 6.0
"""Time of a load where one is to die in the middle: that of its preset, as the clock of these engines runs faster."""
SLOW = f"{PRESET}+adapter_disk_ms={round(SLOW_LOAD_S * 20_000)}"


@pytest.fixture(scope="module")
def adapter_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    words = ("--replicas", "2", "--workers", "1", "--instances", "4", "--preset", PRESET, *QUICK)
    with running_fleet(tmp_path_factory.mktemp("adapters"), words) as started:
        until(lambda: {each["state"] for each in started.instances().values()} == {"ready"}, "all are ready")
        yield started


def call(fleet: Fleet, path: str, body: dict[str, Any]) -> tuple[int, str, dict[str, str]]:
    request = urllib.request.Request(
        f"{fleet.endpoint}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), {}


def load(fleet: Fleet, name: str, **more: Any) -> tuple[int, str]:
    return call(fleet, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": f"/adapters/{name}", **more})[:2]


def unload(fleet: Fleet, name: str) -> int:
    return call(fleet, "/v1/unload_lora_adapter", {"lora_name": name})[0]


def ask(fleet: Fleet, name: str, prompt: str = "hello", tokens: int = 2) -> tuple[int, str]:
    """The status, and the instance that answered."""
    status, _, fields = call(fleet, "/v1/completions", {"model": name, "prompt": prompt, "max_tokens": tokens})
    return status, fields.get("x-dualmap-instance", "")


def rows_of(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    return [each for each in fleet.get("/admin/adapters")["adapters"] if each["adapter"] == name]


def answering(fleet: Fleet) -> int:
    """Live requests whose first tokens came."""
    return sum(each["state"] == "prefilled" for each in fleet.live_requests())


def homes_of_live(fleet: Fleet) -> list[str]:
    """The instances of live requests; empty where one is not placed yet."""
    return [each["instance_id"] for each in fleet.live_requests()]


def having(fleet: Fleet, name: str) -> set[str]:
    """The instances whose servers list the adapter, by what they say themselves."""
    found = set()
    for instance_id, about in fleet.instances().items():
        with urllib.request.urlopen(f"{about['url']}/v1/models", timeout=60) as answer:
            if name in [card["id"] for card in json.loads(answer.read())["data"]]:
                found.add(instance_id)
    return found


def test_an_adapter_is_loaded_by_one_command_served_by_every_replica_and_unloaded_everywhere(
    adapter_fleet: Fleet,
) -> None:
    fleet = adapter_fleet
    said = fleet.dualmap("adapters", "--url", fleet.endpoint, "load", "sql", "/adapters/sql", "--rank", "8")
    homes = having(fleet, "sql")
    asked = [ask(fleet, "sql", f"{number}") for number in range(8)]
    table = fleet.dualmap("adapters", "--url", fleet.endpoint)

    assert "added successfully" in said
    assert len(homes) == 2
    assert {status for status, _ in asked} == {200}
    assert "sql" in table
    assert "removed successfully" in fleet.dualmap("adapters", "--url", fleet.endpoint, "unload", "sql")
    assert not having(fleet, "sql")
    assert ask(fleet, "sql")[0] == 404


def test_an_instance_that_dies_loses_no_request_of_its_adapters_and_has_them_again(adapter_fleet: Fleet) -> None:
    fleet = adapter_fleet
    names = [f"hot-{number}" for number in range(6)]
    assert {load(fleet, name)[0] for name in names} == {200}
    dead = max(fleet.instances(), key=lambda each: sum(each in having(fleet, name) for name in names))
    lost = [name for name in names if dead in having(fleet, name)]
    fleet.emulator(dead, "/emulator/die", {"abruptly": True, "revive_after_s": 3})

    with ThreadPoolExecutor(8) as senders:
        asked = [senders.submit(ask, fleet, name, f"{name} {turn}") for turn in range(8) for name in names]
        statuses = {each.result()[0] for each in asked}

    assert statuses == {200}
    until(lambda: fleet.instances()[dead]["state"] == "ready", f"{dead} is back")
    until(lambda: all(dead in having(fleet, name) for name in lost), f"{dead} has its adapters again")
    fleet.until_idle()
    assert {unload(fleet, name) for name in names} == {200}


def test_an_adapter_that_is_unloaded_while_it_answers_ends_its_answers(adapter_fleet: Fleet) -> None:
    fleet = adapter_fleet
    load(fleet, "leaving")
    with ThreadPoolExecutor(4) as senders:
        asked = [senders.submit(ask, fleet, "leaving", f"{number}", 400) for number in range(4)]
        until(lambda: answering(fleet) == 4 or all(each.done() for each in asked), "they answer")
        assert unload(fleet, "leaving") == 200
        statuses = {each.result()[0] for each in asked}

    assert statuses == {200}
    assert not having(fleet, "leaving")
    fleet.until_idle()


def test_a_store_that_lost_everything_is_given_the_adapters_again(adapter_fleet: Fleet) -> None:
    fleet = adapter_fleet
    load(fleet, "kept", tenant=None, rank=16)
    with redis.Redis(unix_socket_path=fleet.store_url.removeprefix("unix://")) as store:
        until(lambda: fleet.get("/admin/adapters")["adapters"], "it is known")
        store.flushall()
        until(lambda: store.hget("dualmap:{default}:adapter_records", "kept"), "its record is back")

    until(lambda: ask(fleet, "kept")[0] == 200, "it is served")
    rows = [until(lambda: rows_of(fleet, "kept"), "every replica lists it") for _ in range(8)]
    assert {each["registered"]["rank"] for (each,) in rows} == {16}
    assert unload(fleet, "kept") == 200


@pytest.fixture
def slow_fleet(tmp_path: Path) -> Iterator[Fleet]:
    words = ("--replicas", "2", "--workers", "1", "--instances", "3", "--preset", SLOW, *QUICK)
    with running_fleet(tmp_path, words) as started:
        until(lambda: {each["state"] for each in started.instances().values()} == {"ready"}, "all are ready")
        yield started


def test_what_dies_in_the_middle_of_a_load_leaves_nothing_stuck(slow_fleet: Fleet) -> None:
    """First both routers, between registration and load; then an instance that loads, while requests wait for it."""
    fleet = slow_fleet
    key = "dualmap:{default}:adapter_records"
    with (
        ThreadPoolExecutor(8) as senders,
        redis.Redis(unix_socket_path=fleet.store_url.removeprefix("unix://")) as store,
    ):
        loading = senders.submit(load, fleet, "sql")
        until(lambda: store.hexists(key, "sql"), "it is registered", 10)
        for router in ("router-1", "router-2"):
            fleet.kill(router)
        with pytest.raises(OSError):
            loading.result()
        until(lambda: fleet.is_ready, "routers are back")
        until(lambda: len(having(fleet, "sql")) == 2, "the leader has finished what they began")
        assert ask(fleet, "sql")[0] == 200
        assert load(fleet, "sql")[0] in (200, 400)

        loading = senders.submit(load, fleet, "law")
        until(lambda: store.hexists(key, "law"), "it is registered", 10)
        until(lambda: "law" in [each["id"] for each in fleet.get("/v1/models")["data"]], "it is served")
        waiting = [senders.submit(ask, fleet, "law", f"{number}") for number in range(4)]
        placed = until(lambda: len(found := homes_of_live(fleet)) == 4 and all(found) and found, "they wait for it", 10)
        began_s = time.monotonic()
        dead = placed[0]
        fleet.emulator(dead, "/emulator/die", {"abruptly": True, "revive_after_s": 2})
        assert {each.result()[0] for each in waiting} == {200}
        assert time.monotonic() - began_s < 30
        assert loading.result()[0] == 200
    fleet.until_idle()
