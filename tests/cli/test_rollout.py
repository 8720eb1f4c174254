"""What `dualmap rollout` and `dualmap revisions` take and print."""

from __future__ import annotations

import argparse

import pytest

from dualmap.cli import adapters, revisions, rollout
from dualmap.scheduling.revisions.figures import Figures, Moments
from dualmap.scheduling.revisions.rollout import STEPS, Rollout


def parsed(module: object, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(words)


def test_steps_and_bounds_are_read_as_people_write_them() -> None:
    start = parsed(rollout, "start", "v2", "--steps", "1,5%,100", "--bound", "ttft=1.1", "--bound", "wrong=0.02")

    assert start.steps == [1.0, 5.0, 100.0]
    assert dict(start.bound) == {"ttft": 1.1, "wrong": 0.02}
    assert rollout.changes_a_fleet(start)
    assert not rollout.changes_a_fleet(parsed(rollout))


@pytest.mark.parametrize("words", [("start", "v2", "--steps", "a"), ("start", "v2", "--bound", "ttft")])
def test_what_is_no_step_or_bound_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(rollout, *words)
    assert "as " in capsys.readouterr().err


@pytest.mark.parametrize(("module", "action"), [(revisions, "audit"), (rollout, "status"), (adapters, "list")])
def test_the_fleet_and_json_are_named_before_the_action_or_behind_it(module: object, action: str) -> None:
    options = ("--json", "--url", "http://a")

    for words in ((*options, action), (action, *options), ("--json", action, "--url", "http://a")):
        found = parsed(module, *words)
        assert (found.json, found.url, found.pool) == (True, "http://a", None)
    assert parsed(module, action).json is False


def test_weights_are_read_with_and_without_a_percent_sign() -> None:
    assert dict(parsed(revisions, "set", "v1=95%", "a=b=5").weights) == {"v1": 95.0, "a=b": 5.0}
    with pytest.raises(SystemExit):
        parsed(revisions, "set", "v1")


def test_a_status_says_where_it_is_and_what_each_figure_says() -> None:
    times = Moments(400, 0.0, 100.0)
    shown = Rollout("v2", STEPS, figures={"v1": Figures(400, ttft=times), "v2": Figures(40, ttft=times)}).described()

    assert "v1 400, v2 40" in rollout.headline("default", shown)
    assert "step 1 of 5" in rollout.headline("default", shown)
    assert rollout.figures_table(shown).row_count == 6


def test_a_status_says_how_many_greedy_answers_differ_also_of_a_revision_from_itself() -> None:
    figures = {"v1": Figures(compared=40), "v2": Figures(300, compared=200, differing=50, agreed_tokens=150)}
    shown = Rollout("v2", STEPS, figures=figures).described()

    first, second = rollout.beside(shown)
    assert first == "v1: 0 of 40 greedy answers differ"
    assert second.endswith("answers that differ part after 3 tokens, 50 of 200 greedy answers differ")


def test_revisions_without_a_weight_are_named() -> None:
    found = {
        "in_force": True,
        "tenants": {"acme": "v2"},
        "revisions": [
            {"revision": "v1", "percent": 100.0, "instances": 2, "ready": 2},
            {"revision": "v3", "percent": None, "instances": 1, "ready": 1},
        ],
    }

    assert revisions.remarks(found) == ["tenant acme: v2", "v3 has no weight: its instances are sent nothing"]
    assert revisions.revisions_table(found).row_count == 2
    assert "all instances" in revisions.remarks({**found, "in_force": False})[0]
