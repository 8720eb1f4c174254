"""Prompts that may kill engines: one trial after the first death, refused after the second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import dualmap.router.quarantine as quarantine_module
from dualmap.router.errors import RequestQuarantinedError
from dualmap.router.quarantine import FIRST_REFUSAL_S, MEMORY_S, ONE_DEATH_S, TRIAL_S, Quarantine, Trial

PROMPT, OTHER = 7, 8


@pytest.fixture
def quarantine(clock: Any) -> Quarantine:
    return Quarantine(clock, clock.call_later)


def dies(quarantine: Quarantine, prompt_hash: int, instance_id: str) -> None:
    """The instance dies under the prompt, as a live one."""
    quarantine.answered(instance_id)
    quarantine.died(prompt_hash, instance_id, "r", quarantine._clock.monotonic_s())


async def trial_of(quarantine: Quarantine, prompt_hash: int = PROMPT) -> Trial:
    trial = await quarantine.admit(prompt_hash)
    assert trial is not None
    return trial


async def test_who_is_no_suspect_passes(quarantine: Quarantine) -> None:
    dies(quarantine, OTHER, "a")
    assert await quarantine.admit(PROMPT) is None


async def test_copies_of_a_suspect_wait_until_its_trial_has_shown_a_token(quarantine: Quarantine, tools: Any) -> None:
    dies(quarantine, PROMPT, "a")
    trial = await trial_of(quarantine)
    copy = asyncio.create_task(quarantine.admit(PROMPT))
    await tools.settle()
    assert not copy.done()

    trial.passed.set()

    assert await copy is None
    trial.end(completed=True)
    assert await quarantine.admit(PROMPT) is None, "cleared"


async def test_a_second_death_convicts_and_requests_that_waited_are_refused(
    quarantine: Quarantine, clock: Any, tools: Any, caplog: pytest.LogCaptureFixture
) -> None:
    dies(quarantine, PROMPT, "a")
    trial = await trial_of(quarantine)
    copy = asyncio.create_task(quarantine.admit(PROMPT))
    await tools.settle()

    dies(quarantine, PROMPT, "b")
    trial.end(completed=False)

    with pytest.raises(RequestQuarantinedError) as refused:
        await copy
    assert refused.value.retry_after_s == FIRST_REFUSAL_S
    assert "a, b" in caplog.text
    clock.now_s += FIRST_REFUSAL_S - 1
    with pytest.raises(RequestQuarantinedError):
        await quarantine.admit(PROMPT)


async def test_every_further_death_doubles_the_time(quarantine: Quarantine, clock: Any) -> None:
    for instance_id in ("a", "b", "c"):
        dies(quarantine, PROMPT, instance_id)
    clock.now_s += FIRST_REFUSAL_S
    with pytest.raises(RequestQuarantinedError) as refused:
        await quarantine.admit(PROMPT)
    assert refused.value.retry_after_s == FIRST_REFUSAL_S

    clock.now_s += FIRST_REFUSAL_S
    (await trial_of(quarantine)).end(completed=True)

    assert await quarantine.admit(PROMPT) is None, "it was somebody else's doing"


async def test_the_requests_of_one_engine_die_of_one_death(quarantine: Quarantine, clock: Any) -> None:
    sent_s = clock.now_s
    for _ in range(20):
        quarantine.died(PROMPT, "a", "r", sent_s)
        clock.now_s += ONE_DEATH_S / 40
    (await trial_of(quarantine)).end(completed=False)

    clock.now_s += ONE_DEATH_S
    quarantine.answered("a")
    clock.now_s += 0.1
    quarantine.died(PROMPT, "a", "r", clock.now_s)

    with pytest.raises(RequestQuarantinedError):
        await quarantine.admit(PROMPT)


async def test_a_trial_that_ends_without_a_verdict_leaves_its_place_to_the_next(
    quarantine: Quarantine, tools: Any
) -> None:
    dies(quarantine, PROMPT, "a")
    trial = await trial_of(quarantine)
    copies = [asyncio.create_task(quarantine.admit(PROMPT)) for _ in range(2)]
    await tools.settle()
    copies[0].cancel()

    trial.end(completed=False)

    await tools.settle()
    following = await copies[1]
    assert following is not None and following is not trial


async def test_a_trial_is_not_waited_for_without_end(quarantine: Quarantine, clock: Any, tools: Any) -> None:
    dies(quarantine, PROMPT, "a")
    await trial_of(quarantine)
    copy = asyncio.create_task(quarantine.admit(PROMPT))
    await clock.advance(TRIAL_S - 1)
    assert not copy.done()

    await clock.advance(1)

    assert await copy is None


async def test_suspects_are_forgotten_in_time_and_in_number(
    quarantine: Quarantine, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies(quarantine, PROMPT, "a")
    clock.now_s += MEMORY_S
    assert quarantine.of(PROMPT) is None

    monkeypatch.setattr(quarantine_module, "MAX_SUSPECTS", 2)
    for prompt_hash in (1, 2, 1, 3):
        dies(quarantine, prompt_hash, "a")
    assert [quarantine.of(prompt_hash) is not None for prompt_hash in (1, 2, 3)] == [True, False, True]


# control -------------------------------------------------------------------------------------------------------
async def test_an_instance_that_answered_nothing_since_it_died_blames_nobody(
    quarantine: Quarantine, clock: Any
) -> None:
    for name in "ab":
        dies(quarantine, OTHER, name)
    clock.now_s += 0.01

    for name in "abab":
        quarantine.died(PROMPT, name, "r", clock.now_s)

    assert quarantine.of(PROMPT) is None
    clock.now_s += 60.0
    quarantine.died(PROMPT, "a", "r", clock.now_s)
    assert quarantine.of(PROMPT) is None, "however long ago it died"
    quarantine.answered("a")
    clock.now_s += 1.0
    quarantine.died(PROMPT, "a", "r", clock.now_s)
    assert quarantine.of(PROMPT) is not None


@pytest.mark.parametrize("lost", ["died", "unreachable"])
async def test_prompts_are_innocent_of_deaths_that_happened_elsewhere_too(
    quarantine: Quarantine, clock: Any, lost: str
) -> None:
    for name in "ab":
        dies(quarantine, PROMPT, name)
    clock.now_s += 1.0
    for name in "cd":
        if lost == "died":
            dies(quarantine, OTHER, name)
        else:
            quarantine.unreachable(name)

    (await trial_of(quarantine)).end(completed=True)

    assert await quarantine.admit(PROMPT) is None


async def test_a_prompt_that_kills_on_after_a_common_cause_is_refused(quarantine: Quarantine, clock: Any) -> None:
    for name in "ab":
        dies(quarantine, PROMPT, name)
    for name in "cd":
        quarantine.unreachable(name)
    (await trial_of(quarantine)).end(completed=False)
    clock.now_s += 60.0
    dies(quarantine, PROMPT, "a")

    with pytest.raises(RequestQuarantinedError):
        await quarantine.admit(PROMPT)


async def test_two_prompts_that_kill_at_the_same_time_do_not_excuse_each_other(quarantine: Quarantine) -> None:
    for prompt_hash, names in ((PROMPT, "ab"), (OTHER, "cd")):
        for name in names:
            dies(quarantine, prompt_hash, name)
        with pytest.raises(RequestQuarantinedError):
            await quarantine.admit(prompt_hash)
        for name in names:
            quarantine.unreachable(name)  # as later requests find

    for prompt_hash in (PROMPT, OTHER):
        with pytest.raises(RequestQuarantinedError):
            await quarantine.admit(prompt_hash)


async def test_what_left_the_fleet_is_no_control(quarantine: Quarantine) -> None:
    dies(quarantine, PROMPT, "a")
    quarantine.forget_all_but({"b": None})
    assert not (quarantine._answered_s or quarantine._died_s or quarantine._lost_s)
