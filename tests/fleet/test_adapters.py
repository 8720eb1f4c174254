"""Requests for adapters on real processes: each finds the instance that has its adapter on the device."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet.fleet_process import Fleet, running_fleet, until

ADAPTERS = tuple(f"adapter-{number}" for number in range(8))
TURNS = 6


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    words = ("--replicas", "2", "--workers", "1", "--instances", "4", "--preset", "qwen2.5-7b-910b4:adapter_slots=4")
    names = ("--emulator.loras", json.dumps(ADAPTERS))
    with running_fleet(tmp_path_factory.mktemp("adapters"), (*words, *names)) as started:
        until(lambda: {each["state"] for each in started.instances().values()} == {"ready"}, "all are ready")
        yield started


def served_by(fleet: Fleet, adapter: str, prompt: str) -> str:
    body = json.dumps({"model": adapter, "prompt": prompt, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{fleet.endpoint}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()
        return str(answer.headers["x-dualmap-instance"])


def test_the_room_for_adapters_is_read_from_instances_that_have_served_one(fleet: Fleet) -> None:
    until(lambda: ADAPTERS[0] in str(fleet.get("/v1/models")), "the adapter is known")
    home = served_by(fleet, ADAPTERS[0], "how many are there?")

    until(lambda: fleet.instances()[home]["adapter_slots"] == 4, "its slots are known")


def test_prompts_of_an_adapter_share_no_prefix_and_meet_on_its_two_instances(fleet: Fleet) -> None:
    until(lambda: all(name in str(fleet.get("/v1/models")) for name in ADAPTERS), "the adapters are known")
    placed = {
        adapter: {served_by(fleet, adapter, f"{turn} of {adapter}: " + f"word {turn} " * 400) for turn in range(TURNS)}
        for adapter in ADAPTERS
    }
    loads = sum(adapter_loads(fleet, each) for each in fleet.instances())

    assert max(map(len, placed.values())) <= 2
    assert loads <= 2 * len(ADAPTERS)


def test_people_see_where_an_adapter_is(fleet: Fleet) -> None:
    until(lambda: ADAPTERS[0] in str(fleet.get("/v1/models")), "the adapter is known")
    home = served_by(fleet, ADAPTERS[0], "where is it?")
    until(lambda: fleet.instances()[home]["adapter_slots"] == 4, "its slots are known")
    home = served_by(fleet, ADAPTERS[0], "where is it now?")

    until(lambda: home in seen(fleet).get(ADAPTERS[0], {}).get("device", ()), "it is listed")
    assert f"{ADAPTERS[0]} " in fleet.dualmap("adapters", "--url", fleet.endpoint)


def test_an_adapter_that_is_used_past_the_fleet_is_seen(fleet: Fleet) -> None:
    instance_id, spec = min(fleet.instances().items())
    name = next(each for each in ADAPTERS if instance_id not in seen(fleet).get(each, {}).get("device", ()))
    client = http.client.HTTPConnection(spec["url"].removeprefix("http://"), timeout=60)
    body = json.dumps({"model": name, "prompt": "past it", "max_tokens": 4000, "ignore_eos": True, "stream": True})
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    try:
        until(lambda: instance_id in seen(fleet).get(name, {}).get("device", ()), "it is on the device")
    finally:
        client.close()

    assert seen(fleet)[name]["running"] == 0, "no request of the fleet runs"


def seen(fleet: Fleet) -> dict[str, dict[str, Any]]:
    shown = json.loads(fleet.dualmap("adapters", "--url", fleet.endpoint, "--json"))
    return {each["adapter"]: each for each in shown["adapters"]}


def adapter_loads(fleet: Fleet, instance_id: str) -> int:
    url = fleet.instances()[instance_id]["url"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        found = re.search(r"^vllm:emulated_adapter_loads_total\{[^}]*\} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(float(found[1]))
