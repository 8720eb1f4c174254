from math import inf

import pytest

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.runs.admission import AGED_S, MEMORY_SHARE, QUANTUM_FROM, SILENT_S, RunAdmission, Turn

CAPACITY_TOKENS = 1000
BLOCK_TOKENS = 100
FITS = int(MEMORY_SHARE * CAPACITY_TOKENS)


class Fleet:
    """An admission, with turns named by their run and number."""

    def __init__(self) -> None:
        self.admission = RunAdmission(lambda: CAPACITY_TOKENS)
        self.turns = 0

    def arrives(
        self,
        run: str,
        tokens: int,
        now_s: float,
        branch: str = "",
        *,
        shared: tuple[int, ...] = (),
        latest_s: float = inf,
    ) -> tuple[str, tuple[str, ...]]:
        """The id of the turn, and the turns that go. Its prompt begins with the blocks ``shared``."""
        self.turns += 1
        turn_id = f"{run}-{self.turns}"
        chain = Chain((*shared, 1000 + self.turns), BLOCK_TOKENS, tokens)
        return turn_id, self.admission.arrives(Turn(turn_id, run, branch or run, chain, latest_s), now_s)

    def turn(self, run: str, tokens: int, now_s: float, output_tokens: int = 0, takes_s: float = 0.0) -> None:
        """A turn that goes at once, and ends."""
        turn_id, goes = self.arrives(run, tokens, now_s)
        assert goes == (turn_id,)
        self.admission.ends(turn_id, output_tokens, now_s + takes_s)

    def knows_quantum(self, service: float) -> None:
        """Runs of this service have ended, and given way to others."""
        for number in range(QUANTUM_FROM + 1):
            at_s = -10_000 + number * 200.0
            self.turn(f"former{number}", FITS, at_s, takes_s=service / FITS)
        assert self.admission.used_tokens == FITS


def test_runs_that_fit_go_at_once_and_a_turn_of_an_active_run_always_goes() -> None:
    fleet = Fleet()

    fleet.turn("a", FITS // 2, 0.0, output_tokens=50)
    fleet.turn("b", FITS // 2 - 50, 1.0)
    fleet.turn("a", FITS, 2.0)

    assert fleet.admission.used_tokens == FITS + FITS // 2 - 50, "beyond what fits: nothing is stopped at work"


def test_a_run_that_does_not_fit_waits_until_another_has_been_silent() -> None:
    fleet = Fleet()
    fleet.turn("a", FITS, 0.0)

    waits, goes = fleet.arrives("b", 100, 1.0)
    assert goes == ()
    assert fleet.admission.waiting_turns == 1
    assert fleet.admission.due(SILENT_S) == (), "it may come back"
    assert fleet.admission.due(SILENT_S + 0.1) == (waits,)
    assert fleet.admission.waiting_turns == 0


def test_a_run_at_work_is_not_silent_however_long_its_turn_takes() -> None:
    fleet = Fleet()
    at_work, _ = fleet.arrives("a", FITS, 0.0)
    waits, _ = fleet.arrives("b", 100, 1.0)

    assert fleet.admission.due(1000.0) == ()
    assert fleet.admission.ends(at_work, 10, 1000.0) == ()
    assert fleet.admission.due(1000.1 + SILENT_S) == (waits,)


def test_a_newcomer_does_not_pass_those_that_wait_with_as_little_service() -> None:
    fleet = Fleet()
    fleet.turn("a", FITS - 50, 0.0)
    first, _ = fleet.arrives("big", 500, 1.0)
    second, goes = fleet.arrives("small", 10, 2.0)

    assert goes == ()
    assert fleet.admission.due(20.0) == (first, second)


def test_a_silent_run_that_returns_goes_before_new_ones() -> None:
    fleet = Fleet()
    fleet.turn("begun", FITS, 0.0, takes_s=30.0)
    other, _ = fleet.arrives("other", FITS, 31.0)
    assert fleet.admission.due(41.0) == (other,)
    new, _ = fleet.arrives("new", FITS, 42.0)
    returns, _ = fleet.arrives("begun", FITS, 43.0)

    fleet.admission.ends(other, 0, 44.0)

    assert fleet.admission.due(54.1) == (returns,)
    fleet.admission.ends(returns, 0, 55.0)
    assert fleet.admission.due(65.1) == (new,)


def test_a_turn_that_is_late_waits_behind_those_that_can_be_on_time_but_not_for_ever() -> None:
    fleet = Fleet()
    at_work, _ = fleet.arrives("at work", FITS, 0.0)
    late, _ = fleet.arrives("late", FITS, 1.0, latest_s=5.0)
    on_time, _ = fleet.arrives("on time", FITS, 8.0, latest_s=50.0)
    fleet.admission.ends(at_work, 0, 9.0)
    assert fleet.admission.due(19.1) == (on_time,)

    fleet.arrives("on time, too", FITS, 20.0, latest_s=inf)
    aged_s = 1.1 + AGED_S
    fleet.admission.ends(on_time, 0, aged_s)

    assert fleet.admission.due(aged_s + 10.1) == (late,)


def test_a_run_that_had_its_quantum_gives_way_between_two_turns_to_one_with_less_service() -> None:
    fleet = Fleet()
    fleet.knows_quantum(service=100.0 * FITS)
    fleet.turn("long", FITS - 100, 0.0, takes_s=150.0)
    waits, goes = fleet.arrives("new", 200, 150.0)
    assert goes == ()

    returns, goes = fleet.arrives("long", FITS - 50, 151.0)

    assert goes == (waits,)
    fleet.admission.ends(waits, 0, 152.0)
    assert fleet.admission.due(162.1) == (returns,)


def test_a_run_without_its_quantum_goes_on_though_others_wait() -> None:
    fleet = Fleet()
    fleet.knows_quantum(service=100.0 * FITS)
    fleet.turn("young", FITS - 100, 0.0, takes_s=50.0)
    fleet.arrives("new", 200, 50.0)

    turn_id, goes = fleet.arrives("young", FITS - 50, 51.0)

    assert goes == (turn_id,)


def test_sub_agents_of_an_active_run_go_at_once_and_no_longer_count_when_they_are_done() -> None:
    fleet = Fleet()
    fleet.turn("a", 300, 0.0)
    for branch in ("s1", "s2"):
        turn_id, goes = fleet.arrives("a", 400, 1.0, branch)
        assert goes == (turn_id,), "beyond what fits"
        fleet.admission.ends(turn_id, 0, 2.0)
    assert fleet.admission.used_tokens == 1100

    fleet.arrives("a", 350, 20.0, "a")

    assert fleet.admission.used_tokens == 350


def test_turns_of_one_run_that_wait_go_together() -> None:
    fleet = Fleet()
    fleet.turn("a", FITS, 0.0)
    one, _ = fleet.arrives("b", 100, 1.0, "s1")
    other, _ = fleet.arrives("b", 100, 1.0, "s2")

    assert fleet.admission.due(20.0) == (one, other)


def test_a_prefix_that_several_runs_begin_with_counts_for_the_first_of_them() -> None:
    fleet = Fleet()
    fleet.arrives("a", 500, 0.0, shared=(1, 2, 3, 4))
    assert fleet.admission.used_tokens == 500

    first, _ = fleet.arrives("b", 500, 1.0, shared=(1, 2, 3, 4))
    assert fleet.admission.used_tokens == 600
    fleet.admission.ends(first, 20, 2.0)
    assert fleet.admission.used_tokens == 620

    fleet.arrives("b", 600, 3.0, shared=(1, 2, 3, 4))
    assert fleet.admission.used_tokens == 700, "the part that it shares is that of its first prompt"


def test_a_run_that_is_larger_than_the_memory_is_served_alone() -> None:
    fleet = Fleet()
    turn_id, goes = fleet.arrives("huge", 10 * CAPACITY_TOKENS, 0.0)
    assert goes == (turn_id,)

    waits, goes = fleet.arrives("a", 10, 1.0)
    assert goes == ()
    fleet.admission.ends(turn_id, 0, 2.0)
    again, _ = fleet.arrives("other", 10 * CAPACITY_TOKENS, 3.0)

    assert fleet.admission.due(13.0) == (waits,)
    fleet.admission.ends(waits, 0, 13.0)
    assert fleet.admission.due(24.0) == (again,)


def test_the_books_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualmap.scheduling.runs.admission.MAX_RUNS", 3)
    fleet = Fleet()
    for number in range(10):
        fleet.turn(f"r{number}", 10, float(number))

    assert fleet.admission.used_tokens == 30, "of the last three"
