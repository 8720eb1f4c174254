"""``dualmap runs``: the list of runs, and where the time of one of them went."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from dualmap.cli.main import main
from dualmap.cli.runs import explained, runs_table
from tests.cli.scripted_replica import Replica

RUN = {
    "run": "91c0de55aa1077b2", "tenant": "acme", "parent": "", "state": "at a tool", "home": "instance-1", "turns": 14,
    "turns_in_flight": 0, "turns_waiting": 0, "context_tokens": 2930, "output_tokens": 88, "service_token_s": 12345,
    "waits_s": 0.0, "waited_s": 10.0, "prefill_s": 2.0, "decode_s": 3.0, "tools_s": 5.0, "begun_s_ago": 65.0,
    "seen_s_ago": 3.3,
    "agents": [
        {"agent": "aa01", "context_tokens": 2000, "turns_in_flight": 0, "seen_s_ago": 3.3},
        {"agent": "bb02", "context_tokens": 930, "turns_in_flight": 0, "seen_s_ago": 9.0},
    ],
}  # fmt: skip
PARKED = {**RUN, "run": "f3a2c1d09b77", "state": "parked", "home": "", "waits_s": 3.1, "agents": RUN["agents"][:1]}
MEMORY = {"used_tokens": 2930, "capacity_tokens": 4000, "waiting_turns": 1}


def shown(what: RenderableType) -> str:
    text = io.StringIO()
    Console(file=text, width=160).print(what)
    return text.getvalue()


def test_runs_are_listed_with_the_memory_that_they_have() -> None:
    text = shown(runs_table({"pool": "default", "admitted": True, "memory": MEMORY, "runs": [PARKED, RUN]}))

    assert "2,930 of 4,000 tokens; 1 turns wait" in text
    assert [line.split()[0] for line in text.splitlines()[2:]] == ["f3a2c1d09b77", "91c0de55aa10"]


def test_where_the_time_of_a_run_went_is_explained_by_its_parts() -> None:
    text = shown(explained(RUN))

    assert "run 91c0de55aa1077b2, of acme, at a tool, on instance-1" in text
    assert "14 turns since 65.0 s" in text
    for words, share in (("waiting for memory", "50%"), ("to the first token", "10%"), ("its own tools", "25%")):
        (line,) = [line for line in text.splitlines() if words in line]
        assert share in line
    assert "aa01" in text and "bb02" in text
    assert "a turn waits since 3.1 s" in shown(explained(PARKED))


def test_one_run_is_explained_by_its_id_and_several_of_a_name_are_listed(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"pool": "default", "admitted": True, "memory": MEMORY}
    replica.answers = [(200, {**answer, "runs": [RUN]}), (200, {**answer, "runs": [PARKED, RUN]})]

    assert main(["runs", "--url", replica.url, "91c0"]) == 0
    assert "where its agents' time went" in capsys.readouterr().out
    assert main(["runs", "--url", replica.url, "my session", "--tenant", "acme"]) == 0
    assert "turns wait" in capsys.readouterr().out
    assert [path for _, path, _, _ in replica.asked] == [
        "/admin/runs?run=91c0&limit=50",
        "/admin/runs?tenant=acme&run=my+session&limit=50",
    ]


def test_a_run_that_is_not_known_is_an_error(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(200, {"pool": "default", "admitted": True, "memory": MEMORY, "runs": []})]

    assert main(["runs", "--url", replica.url, "gone"]) != 0
    assert "no run is called 'gone'" in capsys.readouterr().err
