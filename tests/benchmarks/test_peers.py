"""The comparison of routers' costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import wheels
from peers import (
    ADDED_P50,
    ADDED_P99,
    AGENT_220K,
    AGENT_550K,
    BURST,
    CORES_2K,
    CORES_220K,
    CORES_550K,
    OTHERS,
    PACED,
    REQUEST_2K,
    REQUEST_32K,
    Measured,
    cores_table,
    cost_table,
    stream_table,
)
from router_overhead import ordered_answer, request


def turn(factor: float, others: float = 0.02) -> dict[str, float]:
    figures = {REQUEST_2K: 200.0, REQUEST_32K: 300.0, AGENT_220K: 600.0, AGENT_550K: 900.0}
    figures |= {PACED: 30.0, BURST: 7.0, ADDED_P50: 1.0, ADDED_P99: 3.0}
    return {**{name: factor * value for name, value in figures.items()}, OTHERS: others}


def test_ratios_are_those_of_the_same_turn() -> None:
    # given a second turn in an hour in which everything costs twice as much
    found = {
        "ours": Measured([turn(1.0), turn(2.0)], [70.0, 80.0]),
        "envoy": Measured([turn(0.5), turn(1.0, others=0.2)], [60.0, 64.0]),
    }

    lines = cost_table(found).splitlines()

    assert lines[2].startswith("| ours | 1.00 (300) | 1.00 (450) |") and "70 → 80" in lines[2]
    assert lines[3].startswith("| envoy | 0.50 (150) | 0.50 (225) |") and lines[3].endswith("| 11% |")


def test_cores_are_medians_of_the_turns() -> None:
    turns = [{CORES_2K: 0.2 * n, CORES_220K: 0.1 * n, CORES_550K: 0.04 * n} for n in (1, 2, 9)]

    lines = cores_table({"ours": Measured(turns)}).splitlines()

    assert lines[0] == "| cores | at 1,000/s of 2 KB | at 100/s of 220 KB | at 40/s of 550 KB |"
    assert lines[2:] == ["| ours | 0.400 | 0.200 | 0.080 |"]


def test_a_router_that_does_not_carry_the_streams_has_no_row() -> None:
    carried = {"CPU share": 0.4, "µs a chunk": 12.0, "gaps P50 ms": 33.0, "gaps P99 ms": 36.0}
    carried |= {"KB a stream": 30.0, OTHERS: 0.0}
    found = {"ours": Measured(streams=carried), "smg": Measured()}

    lines = stream_table(found, {"gaps P50 ms": 33.0, "gaps P99 ms": 35.0}, 1000).splitlines()

    assert [line.split(" | ")[0] for line in (lines[0], *lines[2:])] == ["| 1000 streams", "| no router", "| ours"]
    assert lines[3] == "| ours | 40% | 12.0 | 33.0 | 36.0 | 30.0 | 0% |"


def test_a_request_orders_the_form_of_its_answer_by_its_text() -> None:
    assert ordered_answer(request(2048, 1, "1000,0")) == b"1000,0"
    assert ordered_answer(request(2048, 1)) is None


def test_envoy_gets_a_configuration_with_every_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "_envoy", lambda folder: "/bin/envoy")

    words = wheels.envoy_words(None, [8001, 8002], 9000, tmp_path / "envoy.json")

    resources = json.loads((tmp_path / "envoy.json").read_text())["static_resources"]
    (group,) = resources["clusters"][0]["load_assignment"]["endpoints"]
    ports = [each["endpoint"]["address"]["socket_address"]["port_value"] for each in group["lb_endpoints"]]
    assert (words[0], ports) == ("/bin/envoy", [8001, 8002])
    assert resources["listeners"][0]["address"]["socket_address"]["port_value"] == 9000
