"""Prompts that may kill engines: one trial after the first death, refused after the second."""

from __future__ import annotations

import pytest

import dualmap.scheduling.request.quarantine as quarantine_module
from dualmap.scheduling.request.quarantine import (
    FIRST_REFUSAL_S,
    MEMORY_S,
    ONE_DEATH_S,
    TRIAL_S,
    Admission,
    OtherTrial,
    Quarantine,
    Quarantined,
    Trial,
)

PROMPT, OTHER = 7, 8


class Told:
    """A quarantine, a clock, and what operators are told."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.warnings: list[str] = []
        self.quarantine = Quarantine(self.warnings.append)

    def dies(self, prompt_hash: int, instance_id: str) -> None:
        """The instance dies under the prompt, as a live one."""
        self.quarantine.answered(instance_id, self.now_s)
        self.died(prompt_hash, instance_id)

    def died(self, prompt_hash: int, instance_id: str, sent_s: float | None = None) -> None:
        self.quarantine.died(prompt_hash, instance_id, "r", self.now_s if sent_s is None else sent_s, self.now_s)

    def admit(self, prompt_hash: int = PROMPT) -> Admission:
        return self.quarantine.admit(prompt_hash, self.now_s)

    def trial(self, prompt_hash: int = PROMPT) -> Trial:
        trial = self.admit(prompt_hash)
        assert isinstance(trial, Trial)
        return trial

    def refusal(self, prompt_hash: int = PROMPT) -> Quarantined:
        refused = self.admit(prompt_hash)
        assert isinstance(refused, Quarantined)
        return refused

    def other_trial(self) -> OtherTrial:
        waits = self.admit()
        assert isinstance(waits, OtherTrial)
        return waits


@pytest.fixture
def told() -> Told:
    return Told()


def test_who_is_no_suspect_passes(told: Told) -> None:
    told.dies(OTHER, "a")
    assert told.admit() is None


def test_copies_of_a_suspect_wait_until_its_trial_has_shown_a_token(told: Told) -> None:
    told.dies(PROMPT, "a")
    trial, passed = told.trial(), []
    waits = told.other_trial()
    assert waits.trial is trial
    waits.trial.when_passed(lambda: passed.append("told"))

    trial.passes()

    assert passed == ["told"]
    assert told.admit() is None
    trial.when_passed(lambda: passed.append("at once"))
    assert passed == ["told", "at once"]
    trial.end(completed=True)
    assert passed == ["told", "at once"], "each is told once"
    assert told.admit() is None, "cleared"


def test_a_second_death_convicts_and_requests_that_waited_are_refused(told: Told) -> None:
    told.dies(PROMPT, "a")
    trial = told.trial()
    told.other_trial()

    told.dies(PROMPT, "b")
    trial.end(completed=False)

    assert told.refusal() == Quarantined(2, FIRST_REFUSAL_S)
    assert "a, b" in told.warnings[0]
    told.now_s += FIRST_REFUSAL_S - 1
    assert told.refusal().retry_after_s == 1


def test_every_further_death_doubles_the_time(told: Told) -> None:
    for instance_id in ("a", "b", "c"):
        told.dies(PROMPT, instance_id)
    told.now_s += FIRST_REFUSAL_S
    assert told.refusal().retry_after_s == FIRST_REFUSAL_S

    told.now_s += FIRST_REFUSAL_S
    told.trial().end(completed=True)

    assert told.admit() is None, "it was somebody else's doing"


def test_the_requests_of_one_engine_die_of_one_death(told: Told) -> None:
    sent_s = told.now_s
    for _ in range(20):
        told.died(PROMPT, "a", sent_s)
        told.now_s += ONE_DEATH_S / 40
    told.trial().end(completed=False)

    told.now_s += ONE_DEATH_S
    told.quarantine.answered("a", told.now_s)
    told.now_s += 0.1
    told.died(PROMPT, "a")

    assert told.refusal().deaths == 2


def test_a_trial_that_ends_without_a_verdict_leaves_its_place_to_the_next(told: Told) -> None:
    told.dies(PROMPT, "a")
    trial = told.trial()
    told.other_trial()

    trial.end(completed=False)

    assert told.trial() is not trial


def test_a_trial_is_not_waited_for_without_end(told: Told) -> None:
    told.dies(PROMPT, "a")
    told.trial()
    told.now_s += TRIAL_S - 1
    assert told.other_trial().within_s == 1

    told.now_s += 1

    assert told.admit() is None


def test_suspects_are_forgotten_in_time_and_in_number(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.dies(PROMPT, "a")
    told.now_s += MEMORY_S
    assert told.quarantine.of(PROMPT, told.now_s) is None

    monkeypatch.setattr(quarantine_module, "MAX_SUSPECTS", 2)
    for prompt_hash in (1, 2, 1, 3):
        told.dies(prompt_hash, "a")
    known = [told.quarantine.of(prompt_hash, told.now_s) is not None for prompt_hash in (1, 2, 3)]
    assert known == [True, False, True]

    told.now_s += MEMORY_S
    told.dies(4, "a")
    assert told.quarantine.suspects.keys() == {4}


# control -------------------------------------------------------------------------------------------------------
def test_an_instance_that_answered_nothing_since_it_died_blames_nobody(told: Told) -> None:
    for name in "ab":
        told.dies(OTHER, name)
    told.now_s += 0.01

    for name in "abab":
        told.died(PROMPT, name)

    assert told.quarantine.of(PROMPT, told.now_s) is None
    told.now_s += 60.0
    told.died(PROMPT, "a")
    assert told.quarantine.of(PROMPT, told.now_s) is None, "however long ago it died"
    told.quarantine.answered("a", told.now_s)
    told.now_s += 1.0
    told.died(PROMPT, "a")
    assert told.quarantine.of(PROMPT, told.now_s) is not None


@pytest.mark.parametrize("lost", ["died", "unreachable"])
def test_prompts_are_innocent_of_deaths_that_happened_elsewhere_too(told: Told, lost: str) -> None:
    for name in "ab":
        told.dies(PROMPT, name)
    told.now_s += 1.0
    for name in "cd":
        if lost == "died":
            told.dies(OTHER, name)
        else:
            told.quarantine.unreachable(name, told.now_s)

    told.trial().end(completed=True)

    assert told.admit() is None


def test_a_prompt_that_kills_on_after_a_common_cause_is_refused(told: Told) -> None:
    for name in "ab":
        told.dies(PROMPT, name)
    for name in "cd":
        told.quarantine.unreachable(name, told.now_s)
    told.trial().end(completed=False)
    told.now_s += 60.0
    told.dies(PROMPT, "a")

    assert told.refusal().deaths == 2


def test_two_prompts_that_kill_at_the_same_time_do_not_excuse_each_other(told: Told) -> None:
    for prompt_hash, names in ((PROMPT, "ab"), (OTHER, "cd")):
        for name in names:
            told.dies(prompt_hash, name)
        assert told.refusal(prompt_hash)
        for name in names:
            told.quarantine.unreachable(name, told.now_s)  # as later requests find

    for prompt_hash in (PROMPT, OTHER):
        assert told.refusal(prompt_hash)


def test_what_left_the_fleet_is_no_control(told: Told) -> None:
    told.dies(PROMPT, "a")
    told.quarantine.forget_all_but({"b": None})
    quarantine = told.quarantine
    assert not (quarantine._answered_s or quarantine._died_s or quarantine._lost_s)
