"""A soak complains about processes that grow, and its results are added up by scenario."""

from __future__ import annotations

from dualmap.research.chaos.checker import Outcome
from dualmap.research.chaos.report import merged, results_table, said
from dualmap.research.chaos.scenarios import SCENARIOS
from dualmap.research.chaos.soak import Holdings, grown
from dualmap.research.chaos.stage import Result, Stage
from dualmap.research.chaos.traffic import Tally


def result(name: str, recovery_s: float | None = 1.0, **outcomes: int) -> Result:
    tally = Tally()
    tally.outcomes.update({Outcome(outcome): count for outcome, count in outcomes.items()})
    made = Result(SCENARIOS[name], tally, recovery_s)
    Stage.judge(made)
    return made


def test_an_outcome_that_the_scenario_does_not_allow_is_a_problem() -> None:
    assert result("engine-dead", right=10, cut=2, left=1).problems == []
    assert result("engine-dead", right=10, lost=2).problems == ["2 lost"]
    assert result("store-away", right=10, cut=1).problems == ["1 cut"]
    assert result("router-killed", right=10, lost=3, stuck=1).problems == ["1 stuck"]


def test_a_process_that_grows_is_named_and_one_that_was_started_again_is_not() -> None:
    before = {"router-1": Holdings(1, 60, 100.0), "router-2": Holdings(2, 60, 100.0), "worker-1": Holdings(3, 60, 90.0)}
    after = {
        "router-1": Holdings(1, 61, 110.0),
        "router-2": Holdings(9, 900, 900.0),
        "worker-1": Holdings(3, 200, 90.0),
    }

    assert grown(before, after) == ["worker-1 had 60 files open, and has 200"]
    assert "MiB" in grown(before, {"router-1": Holdings(1, 60, 400.0)})[0]


def test_the_results_of_a_soak_are_added_up_by_scenario() -> None:
    results = [
        result("engine-dead", 2.0, right=5, cut=1),
        result("store-away", 1.0, right=7),
        result("engine-dead", 4.0, right=6, wrong=1),
    ]

    [dead, away] = merged(results)

    assert (dead.tally.outcomes, dead.recovery_s) == ({"right": 11, "cut": 1, "wrong": 1}, 4.0)
    assert dead.problems == ["1 wrong"] and away.problems == []
    rows = {row[0]: row for row in results_table([dead, away]).rows}
    assert rows["all"][1] == 20 and rows["all"][-1] == "1 of 2"


def test_what_did_not_pass_is_said_with_the_answers_that_show_it() -> None:
    failed = result("engine-dead", right=1, cut=1, wrong=1)
    failed.tally.whys += [(Outcome.CUT, "request 3, …"), (Outcome.WRONG, "request 4, …")]

    assert said(failed) == ["engine-dead: 1 wrong", "    wrong: request 4, …"]
