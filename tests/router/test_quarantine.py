"""Prompts that may kill engines: one trial after the first death, refused after the second."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import router.quarantine as quarantine_module
from router.errors import RequestQuarantinedError
from router.quarantine import FIRST_REFUSAL_S, MEMORY_S, ONE_DEATH_S, TRIAL_S, Quarantine, Trial

PROMPT, OTHER = 7, 8


@pytest.fixture
def quarantine(clock: Any) -> Quarantine:
    return Quarantine(clock, clock.call_later)


async def trial_of(quarantine: Quarantine, prompt_hash: int = PROMPT) -> Trial:
    trial = await quarantine.admit(prompt_hash)
    assert trial is not None
    return trial


async def test_who_is_no_suspect_passes(quarantine: Quarantine) -> None:
    quarantine.died(OTHER, "a", "r")
    assert await quarantine.admit(PROMPT) is None


async def test_copies_of_a_suspect_wait_until_its_trial_has_shown_a_token(quarantine: Quarantine, tools: Any) -> None:
    quarantine.died(PROMPT, "a", "r")
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
    quarantine.died(PROMPT, "a", "r")
    trial = await trial_of(quarantine)
    copy = asyncio.create_task(quarantine.admit(PROMPT))
    await tools.settle()

    quarantine.died(PROMPT, "b", "r")
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
        quarantine.died(PROMPT, instance_id, "r")
    clock.now_s += FIRST_REFUSAL_S
    with pytest.raises(RequestQuarantinedError) as refused:
        await quarantine.admit(PROMPT)
    assert refused.value.retry_after_s == FIRST_REFUSAL_S

    clock.now_s += FIRST_REFUSAL_S
    (await trial_of(quarantine)).end(completed=True)

    assert await quarantine.admit(PROMPT) is None, "it was somebody else's doing"


async def test_the_requests_of_one_engine_die_of_one_death(quarantine: Quarantine, clock: Any) -> None:
    for _ in range(20):
        quarantine.died(PROMPT, "a", "r")
        clock.now_s += ONE_DEATH_S / 40
    (await trial_of(quarantine)).end(completed=False)

    clock.now_s += ONE_DEATH_S
    quarantine.died(PROMPT, "a", "r")

    with pytest.raises(RequestQuarantinedError):
        await quarantine.admit(PROMPT)


async def test_a_trial_that_ends_without_a_verdict_leaves_its_place_to_the_next(
    quarantine: Quarantine, tools: Any
) -> None:
    quarantine.died(PROMPT, "a", "r")
    trial = await trial_of(quarantine)
    copies = [asyncio.create_task(quarantine.admit(PROMPT)) for _ in range(2)]
    await tools.settle()
    copies[0].cancel()

    trial.end(completed=False)

    await tools.settle()
    following = await copies[1]
    assert following is not None and following is not trial


async def test_a_trial_is_not_waited_for_without_end(quarantine: Quarantine, clock: Any, tools: Any) -> None:
    quarantine.died(PROMPT, "a", "r")
    await trial_of(quarantine)
    copy = asyncio.create_task(quarantine.admit(PROMPT))
    await clock.advance(TRIAL_S - 1)
    assert not copy.done()

    await clock.advance(1)

    assert await copy is None


async def test_suspects_are_forgotten_in_time_and_in_number(
    quarantine: Quarantine, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantine.died(PROMPT, "a", "r")
    clock.now_s += MEMORY_S
    assert quarantine.of(PROMPT) is None

    monkeypatch.setattr(quarantine_module, "MAX_SUSPECTS", 2)
    for prompt_hash in (1, 2, 1, 3):
        quarantine.died(prompt_hash, "a", "r")
    assert [quarantine.of(prompt_hash) is not None for prompt_hash in (1, 2, 3)] == [True, False, True]
