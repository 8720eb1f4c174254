"""Measuring an emulated engine over HTTP. What times come out depends on the machine; that they come out does not."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.simulation.calibrate import measure
from dualmap.simulation.calibrate.fit import DecodeTime, PrefillTime
from dualmap.simulation.calibrate.measure import CalibrationError, DisturbedError, Engine, Plan, medians_of, plan_for


def test_a_plan_reaches_the_longest_prompt_and_stays_within_memory() -> None:
    plan = plan_for(max_model_len=8192, max_num_seqs=8, kv_capacity_tokens=10_000)
    assert plan.prompt_lengths == (32, 64, 128, 256, 512, 1024, 2048, 4096, 8184)
    assert max(size for size, _ in plan.batches) == 8
    assert all(size * (prompt + plan.decode_tokens) <= 10_000 for size, prompt in plan.batches)
    assert plan_for(1_000_000, 64, 10**7).prompt_lengths[-1] == 32_768


def test_answers_grow_no_further_than_context_and_memory() -> None:
    plan = plan_for(max_model_len=8192, max_num_seqs=8, kv_capacity_tokens=10_000)
    assert plan.holds(4, 2048, 400) and not plan.holds(4, 2048, 500)
    assert plan.holds(1, 8000, 192) and not plan.holds(1, 8000, 193)


async def test_an_engine_is_measured_with_prompts_that_no_cache_knows(start_emulator: Any) -> None:
    emulator = await start_emulator(model="m", max_num_batched_tokens=512)
    plan = Plan((32, 700), ((1, 32), (3, 600)), 8192, 100_000, repetitions=1, decode_tokens=8)
    engine = Engine(emulator.url, "m")
    lines: list[str] = []
    try:
        prefills, decodes = await engine.measure(plan, lines.append)
    finally:
        engine.close()
    assert [each.prompt_tokens for each in prefills] == [32, 700]
    assert [each.sequences for each in decodes] == [1, 3]
    assert decodes[1].context_tokens > 3 * 600
    assert all(each.ttft_s > 0 for each in prefills) and all(each.step_s > 0 for each in decodes)
    assert len(lines) == 5
    assert emulator.generator.engine.statistics().hit_tokens == 0


async def test_a_second_calibration_finds_nothing_cached_by_the_first(start_emulator: Any) -> None:
    emulator = await start_emulator(model="m")
    for _ in range(2):
        engine = Engine(emulator.url, "m")
        try:
            await engine.measure(Plan((700,), (), 8192, 100_000, repetitions=1))
        finally:
            engine.close()
    assert emulator.generator.engine.statistics().hit_tokens == 0


async def test_a_fast_batch_decodes_longer(start_emulator: Any) -> None:
    emulator = await start_emulator(model="m", costs={"overhead_ms": 1.0, "weights_ms": 1.0})
    engine = Engine(emulator.url, "m")
    try:
        _, decodes = await engine.measure(Plan((32,), ((1, 32),), 8192, 100_000, repetitions=1, decode_tokens=8))
    finally:
        engine.close()
    assert decodes[0].context_tokens > 32 + 64  # of an answer of more than 128 tokens


async def test_a_server_that_refuses_is_quoted(start_emulator: Any) -> None:
    emulator = await start_emulator(model="m")
    engine = Engine(emulator.url, "another")
    try:
        with pytest.raises(CalibrationError, match=r"404.*another") as refused:
            await engine.measure(Plan((32,), (), 8192, 100_000))
    finally:
        engine.close()
    assert not isinstance(refused.value, DisturbedError)


class _Disturbed(Engine):
    """Fails at given attempts to measure a prompt alone, or a batch of two."""

    def __init__(self, url: str, attempts: dict[object, list[bool]]) -> None:
        super().__init__(url, "m")
        self.attempts = attempts

    def _fail(self, cell: object) -> None:
        if self.attempts.get(cell) and self.attempts[cell].pop(0):
            raise DisturbedError(f"{cell} did not overlap")

    async def _ttft_s(self, prompt_tokens: int) -> float:
        self._fail(prompt_tokens)
        return await super()._ttft_s(prompt_tokens)

    async def _step(self, sequences: int, prompt_tokens: int, plan: Plan) -> DecodeTime:
        self._fail((sequences, prompt_tokens))
        return await super()._step(sequences, prompt_tokens, plan)


@pytest.mark.parametrize(("failures", "left"), [(2, 3), (3, 2)])
async def test_what_fails_is_measured_again_and_left_out_if_it_goes_on_failing(
    start_emulator: Any, monkeypatch: pytest.MonkeyPatch, failures: int, left: int
) -> None:
    monkeypatch.setattr(measure, "_PAUSE_S", 0.0)
    emulator = await start_emulator(model="m")
    plan = Plan((32, 64, 96), ((1, 32), (2, 32), (3, 32)), 8192, 100_000, repetitions=2, decode_tokens=8)
    engine = _Disturbed(emulator.url, {64: [True] * failures, (2, 32): [True] * failures})
    lines: list[str] = []
    try:
        prefills, decodes = await engine.measure(plan, lines.append)
    finally:
        engine.close()
    assert (len(prefills), len(decodes)) == (left, left)
    given_up = [line.split(":")[0] for line in lines if "measured no more after 3 failures" in line]
    assert given_up == ([] if left == 3 else ["prompt of 64 tokens", "batch of 2, prompts of 32 tokens"])


async def test_what_was_measured_before_it_failed_counts(start_emulator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_PAUSE_S", 0.0)
    emulator = await start_emulator(model="m")
    engine = _Disturbed(emulator.url, {32: [False, True, True, True]})
    try:
        prefills, _ = await engine.measure(Plan((32,), (), 8192, 100_000, repetitions=4))
    finally:
        engine.close()
    assert [each.prompt_tokens for each in prefills] == [32]
    assert engine.attempts == {32: []}


async def test_a_server_that_is_away_is_no_refusal() -> None:
    engine = Engine("http://127.0.0.1:1", "m")
    with pytest.raises(DisturbedError, match="cannot connect"):
        await engine.measure(Plan((32,), (), 8192, 100_000))


def test_the_middle_of_all_rounds_counts() -> None:
    steps = {(2, 32): [DecodeTime(2, context, step_s) for context, step_s in ((90, 0.9), (70, 0.1), (80, 0.2))]}

    prefills, decodes = medians_of({64: [0.5, 9.0, 0.1]}, steps, lambda _: None)

    assert prefills == [PrefillTime(64, 0.5)]
    assert decodes == [DecodeTime(2, 80, 0.2)]
