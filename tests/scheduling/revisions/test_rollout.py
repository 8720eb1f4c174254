"""A rollout in steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.revisions.figures import Figures, Moments
from dualmap.scheduling.revisions.gate import Bounds, Events
from dualmap.scheduling.revisions.rollout import (
    STEPS,
    WARM_UP_REQUESTS,
    Move,
    Rollout,
    RolloutState,
    advanced,
    begun,
    resumed,
    rolled_back,
)
from dualmap.scheduling.revisions.weights import Home, RevisionWeights, WeightError, stands, with_weights

ALONE = RevisionWeights.alone("v1")


def figures(count: int, *, failed: int = 0, mean: float = 0.0) -> Figures:
    """Times around ``exp(mean)`` seconds, which vary by a half."""
    times = Moments(count, count * mean, count * (mean * mean + 0.25))
    return Figures(count, failed, count, 0, count, 0, ttft=times, tpot=times)


def seen(move: Move, **by_revision: Figures) -> Rollout:
    """The rollout with these figures, of caches that were warm from the beginning of the step."""
    return replace(move.rollout, figures=by_revision, cold={})


GOOD = {"v1": figures(20_000), "v2": figures(5_000)}


def start(*steps: float) -> Move:
    return begun("v2", steps or STEPS, Bounds(), ALONE, 1000)


def test_a_rollout_begins_with_its_first_step() -> None:
    move = start()

    assert {name: each.weight for name, each in move.weights.shares.items()} == {"v1": 95.0, "v2": 5.0}
    assert move.rollout.version == move.weights.version
    assert move.weights.are_first, "sessions that began before stay where their cache is"
    assert "v2 has 5 %" in move.text


def test_a_step_is_held_until_there_is_enough_evidence() -> None:
    move = start()

    assert advanced(move.rollout, move.weights, 2000) is None
    assert advanced(seen(move, v1=figures(100), v2=figures(10)), move.weights, 2000) is None


def test_first_tokens_of_cold_caches_are_not_judged() -> None:
    move = start()
    late = [replace(figures(count), ttft=figures(count, mean=3.0).ttft) for count in (WARM_UP_REQUESTS - 1, 1)]
    cold = move.rollout.with_figures({"v1": figures(2000), "v2": late[0]})
    warm = cold.with_figures({"v2": late[1]})
    after = warm.with_figures({"v1": figures(20_000), "v2": figures(5000)})

    assert advanced(cold, move.weights, 2000) is None, "twenty times as slow, as its caches are empty"
    assert advanced(warm, move.weights, 2000) is None
    assert after.sides()[1].ttft.count == 5000
    following = advanced(after, move.weights, 2000)
    assert following is not None and following.rollout.percent == 10.0
    assert following.rollout.cold == {}, "its caches stay warm"


def test_hits_are_compared_once_caches_are_warm() -> None:
    prompts = replace(figures(WARM_UP_REQUESTS), prompt_tokens=4000)
    cold = start().rollout.with_figures({"v1": replace(prompts, hit_tokens=3000), "v2": figures(WARM_UP_REQUESTS - 1)})
    warm = cold.with_figures({"v1": replace(prompts, hit_tokens=3000), "v2": replace(figures(1), prompt_tokens=50)})
    after = warm.with_figures({name: replace(prompts, hit_tokens=2800) for name in ("v1", "v2")})

    assert [_hits(each) for each in (cold, warm, after)] == [(75.0, None), (None, None), (70.0, 70.0)]


def _hits(rollout: Rollout) -> tuple[float | None, float | None]:
    of = rollout.described()["per_revision"]
    return of["v1"]["hits_percent"], of["v2"]["hits_percent"]


def test_caches_that_are_warm_are_judged_as_slow_as_they_are() -> None:
    move = start()
    warm = move.rollout.with_figures({"v1": figures(2000), "v2": figures(WARM_UP_REQUESTS)})

    taken_back = advanced(warm.with_figures({"v1": figures(500), "v2": figures(300, mean=1.0)}), move.weights, 2000)

    assert taken_back is not None and taken_back.rollout.state is RolloutState.ROLLED_BACK
    assert "ttft" in taken_back.text


def test_errors_count_from_the_first_request_on() -> None:
    move = start()

    taken_back = advanced(
        move.rollout.with_figures({"v1": figures(2000), "v2": figures(60, failed=20)}), move.weights, 2000
    )

    assert taken_back is not None and "errors" in taken_back.text


def test_a_rollout_that_is_resumed_is_as_warm_as_it_was() -> None:
    move = start()
    warm = move.rollout.with_figures({"v1": figures(10), "v2": figures(WARM_UP_REQUESTS)})

    assert resumed(warm, move.weights, 2000).rollout.cold == {}
    assert resumed(move.rollout, move.weights, 2000).rollout.cold is None
    assert Rollout.parse(warm.text()) == warm


def test_good_figures_lead_from_step_to_step_to_the_end() -> None:
    move, percents = start(), [5.0]
    while move.rollout.state is RolloutState.RUNNING:
        following = advanced(seen(move, **GOOD), move.weights, 2000)
        assert following is not None
        move = following
        percents.append(move.rollout.percent)
        assert move.rollout.figures == {} or move.rollout.state is RolloutState.DONE

    assert percents == [*STEPS]
    assert move.rollout.state is RolloutState.DONE
    assert stands(move.weights, Home("v1", 1), {"v1", "v2"}), "the last sessions of v1 end where they are"


def test_a_rollout_may_end_below_all_sessions() -> None:
    move = start(20.0)

    ended = advanced(seen(move, **GOOD), move.weights, 2000)

    assert ended is not None
    assert ended.rollout.state is RolloutState.DONE
    assert ended.weights == move.weights


def test_worse_figures_take_all_sessions_back_at_once() -> None:
    move = start()
    bad = seen(move, v1=figures(2000), v2=figures(200, failed=10))

    back = advanced(bad, move.weights, 2000)

    assert back is not None
    assert back.rollout.state is RolloutState.ROLLED_BACK
    assert "errors" in back.rollout.why
    assert back.weights.shares["v2"].weight == 0
    assert not stands(back.weights, Home("v2", move.weights.version), {"v1", "v2"})
    assert stands(back.weights, Home("v1", 0), {"v1", "v2"})
    assert advanced(back.rollout, back.weights, 3000) is None


def test_weights_that_are_changed_by_hand_pause_it() -> None:
    move = start()
    by_hand = with_weights(move.weights, {"v2": 30.0})

    paused = advanced(seen(move, **GOOD), by_hand, 2000)

    assert paused is not None
    assert paused.rollout.state is RolloutState.PAUSED
    assert paused.weights == by_hand
    again = resumed(paused.rollout, by_hand, 3000)
    assert (again.rollout.state, again.rollout.percent) == (RolloutState.RUNNING, 5.0)


def test_a_rollback_by_hand_says_who() -> None:
    move = rolled_back(start().rollout, start().weights, 2000, "by ada")

    assert move.text == "rolled back: by ada"


@pytest.mark.parametrize("steps", [(), (0.0,), (10.0, 5.0), (50.0, 101.0), (5.0, 5.0)])
def test_steps_that_do_not_grow_are_refused(steps: tuple[float, ...]) -> None:
    with pytest.raises(WeightError):
        begun("v2", steps, Bounds(), ALONE, 0)


def test_a_revision_that_serves_alone_cannot_be_rolled_out() -> None:
    with pytest.raises(WeightError):
        begun("v1", (5.0,), Bounds(), ALONE, 0)


def test_the_record_is_read_as_it_was_written() -> None:
    move = begun("v2", STEPS, Bounds.of({"wrong": 0.02}), ALONE, 1000)
    rollout = replace(move.rollout, figures=GOOD, own={"wrong": {"v1": Events(100, 1), "v2": Events(10, 1)}})

    assert Rollout.parse(rollout.text()).text() == rollout.text()
    shown = rollout.described()
    assert shown["requests"] == {"v1": 20_000, "v2": 5_000}
    assert [each["name"] for each in shown["judgements"]] == [
        "ttft",
        "tpot",
        "errors",
        "late",
        "slow",
        "differs",
        "wrong",
    ]
    with pytest.raises((ValueError, LookupError, TypeError)):
        Rollout.parse(b"{}")


def test_a_shadow_is_judged_before_its_revision_serves_any() -> None:
    move = begun("v2", (5.0, 100.0), Bounds(), ALONE, 1000, shadow=10.0)
    assert (move.weights.shadow, move.rollout.percent, move.rollout.is_shadowing) == ("v2", 0.0, True)
    assert "v2" not in move.weights.shares
    assert Rollout.parse(move.rollout.text()) == move.rollout

    passed = advanced(seen(move, **GOOD), move.weights, 2000)

    assert passed is not None
    assert (passed.rollout.percent, passed.weights.shadow) == (5.0, "")
    assert "equal as a shadow" in passed.text


def test_answers_that_differ_beyond_what_one_revision_differs_stop_a_shadow() -> None:
    move = begun("v2", (5.0, 100.0), Bounds(), ALONE, 1000, shadow=10.0)

    def judged(differing: int, own: int) -> Move | None:
        new = replace(figures(400), compared=300, differing=differing)
        return advanced(seen(move, v1=replace(figures(400), compared=100, differing=own), v2=new), move.weights, 2000)

    back = judged(90, 4)
    assert back is not None
    assert back.rollout.state is RolloutState.ROLLED_BACK
    assert "differs" in back.rollout.why
    assert back.weights.shadow == ""
    alike = judged(15, 5)
    assert alike is None or alike.rollout.state is RolloutState.RUNNING
