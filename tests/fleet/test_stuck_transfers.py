"""Transfers that never end, over real processes: they are bounded, and the prompt is prefilled again."""

from __future__ import annotations

import http.client
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

DECODE = ("decode-1", "decode-2")
OPTIONS = (
    "--prefill", "2", "--decode", "2", "--replicas", "1", "--workers", "1",
    "--scheduling.split.mode", "always",
)  # fmt: skip
POOL = "pools:\n  - {{model: qwen2.5-7b, transfer_timeout_s: 0.8, connector: {connector}}}\n"


@pytest.fixture(scope="module", params=["nixl", "mooncake-layerwise"])
def stuck_fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory: Path = tmp_path_factory.mktemp("stuck")
    config = directory / "pools.yaml"
    config.write_text(POOL.format(connector=request.param))
    with running_fleet(directory, (*QUICK, *OPTIONS, "--config", str(config))) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_outlives_its_request(stuck_fleet: Fleet) -> Iterator[None]:
    yield
    stall(stuck_fleet, 0)
    stuck_fleet.until_idle()
    for what in ("staged", "running", "waiting"):
        until(lambda what=what: sum(told(stuck_fleet, what)) == 0, f"nothing is {what}")


def told(fleet: Fleet, name: str) -> list[int]:
    return [fleet.emulator(instance_id, "/emulator/statistics")[name] for instance_id in fleet.instances()]


def stall(fleet: Fleet, count: int) -> None:
    """Let so many of the next transfers of each instance hang."""
    for instance_id in fleet.instances():
        fleet.emulator(instance_id, "/emulator/kv/stall", {"count": count})


def ask(fleet: Fleet, number: int, *, stream: bool) -> tuple[http.client.HTTPResponse, bytes]:
    at = urlsplit(fleet.endpoint)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=30)
    body = {"model": fleet.model, "prompt": f"{number} " + "word " * 500, "max_tokens": 4, "stream": stream}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def retries(fleet: Fleet) -> float:
    with urllib.request.urlopen(f"{fleet.endpoint}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    named = [line for line in lines if line.startswith("dualmap_retries_total{") and 'failure="transfer"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in named)


@pytest.mark.parametrize("stream", [False, True])
def test_a_transfer_that_hangs_costs_another_prefill_and_no_answer(stuck_fleet: Fleet, stream: bool) -> None:
    before = retries(stuck_fleet)
    for instance_id in DECODE:
        stuck_fleet.emulator(instance_id, "/emulator/kv/stall", {"count": 1})

    response, body = ask(stuck_fleet, 10 + stream, stream=stream)

    assert response.status == 200, body
    assert response.headers["x-dualmap-attempts"] == "3"  # one on each decoder, and one from the other prefill instance
    assert retries(stuck_fleet) - before == 2


def test_where_every_transfer_hangs_the_client_is_told_what_to_do(stuck_fleet: Fleet) -> None:
    stall(stuck_fleet, 20)

    response, body = ask(stuck_fleet, 30, stream=True)

    assert response.status == 504, body
    assert "pools.transfer_timeout_s" in json.loads(body)["error"]["message"]
