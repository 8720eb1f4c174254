"""A fleet of processes whose instances pull prefix caches from each other, also from sources that fail on the way."""

from __future__ import annotations

import http.client
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

OPTIONS = (
    "--instances", "2", "--replicas", "1", "--workers", "1", "--emulator.peer_pulls", "true",
    "--scheduling.policy", "dualmap-least-cost", "--time-scale", "1",
)  # fmt: skip
POOL = "pools:\n  - {model: qwen2.5-7b, pulls: {enabled: true}}\n"
WORDS = 16_000
"""Words of a prompt, of 20,000 tokens, which take three seconds to compute."""


@pytest.fixture(scope="module", params=["fail", "recompute"])
def pulling_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory: Path = tmp_path_factory.mktemp("pulls")
    config = directory / "pools.yaml"
    config.write_text(POOL)
    policy = ("--emulator.kv_load_failure_policy", request.param)
    with running_fleet(directory, (*QUICK, *OPTIONS, *policy, "--config", str(config))) as fleet:
        until(lambda: all(each["pulls"] for each in fleet.instances().values()), "it is known where to pull from")
        yield fleet


def pulled(fleet: Fleet, instance_id: str) -> float:
    """Tokens that an instance has pulled."""
    url = fleet.instances()[instance_id]["url"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    found = re.search(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="p2p"\} (\S+)$', page, re.M)
    assert found is not None
    return float(found[1])


def ask(fleet: Fleet, number: int, *, stream: bool = False) -> tuple[http.client.HTTPResponse, dict[str, Any] | bytes]:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=60)
    body = {"model": fleet.model, "prompt": f"{number} " + "word " * WORDS, "max_tokens": 4, "stream": stream}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        return response, answer if stream else json.loads(answer)
    finally:
        connection.close()


def only(fleet: Fleet, instance_id: str) -> None:
    """Have this instance alone serve; the other one is parked."""
    for name, each in fleet.instances().items():
        if name != instance_id and each["state"] == "ready":
            fleet.post(f"/admin/instances/{name}/drain", {})
        elif name == instance_id and each["state"] != "ready":
            fleet.post(f"/admin/instances/{name}/resume", {})
    until(lambda: fleet.instances()[instance_id]["state"] == "ready", "it serves")
    until(lambda: all(each["state"] == "standby" for name, each in fleet.instances().items() if name != instance_id),
          "the other one is parked")  # fmt: skip


def moved(
    fleet: Fleet, number: int, fault: str | None = None, *, stream: bool = False
) -> tuple[http.client.HTTPResponse, Any]:
    """The second answer about a prompt that one instance has, which is parked then; the other one serves."""
    first, second = sorted(fleet.instances())
    only(fleet, first)
    ask(fleet, number)
    only(fleet, second)
    if fault is not None:
        fleet.emulator(first, f"/emulator/peer/{fault}", {"count": 1})
    response, answer = ask(fleet, number, stream=stream)
    fleet.until_idle()
    return response, answer


def test_what_a_parked_instance_has_is_pulled(pulling_fleet: Fleet) -> None:
    second = sorted(pulling_fleet.instances())[1]
    before = pulled(pulling_fleet, second)
    response, answer = moved(pulling_fleet, 1)

    assert response.status == 200
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 19_000
    assert int(response.headers["x-dualmap-cached-tokens"]) > 19_000
    assert response.headers["x-dualmap-attempts"] == "1"
    assert pulled(pulling_fleet, second) - before > 19_000


def test_a_source_that_refuses_costs_a_computation(pulling_fleet: Fleet) -> None:
    response, answer = moved(pulling_fleet, 2, "refuse")

    assert (response.status, response.headers["x-dualmap-attempts"]) == (200, "1")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_pull_that_hangs_is_ended_and_the_prompt_computed(pulling_fleet: Fleet, stream: bool) -> None:
    response, answer = moved(pulling_fleet, 3 + stream, "stall", stream=stream)

    assert (response.status, response.headers["x-dualmap-attempts"]) == (200, "2")
    assert answer
