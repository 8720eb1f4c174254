"""What first tokens of the engine model teach of its times, and what they must not."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.busy_time import PrefillSample
from scheduling.instance import InstanceSpec
from scheduling.latency import Latency, TtftParts
from scheduling.latency_model import LatencyModel
from simulation.engine import Engine
from simulation.engine_types import EngineConfig, EngineRequest, EventKind
from simulation.presets import find_preset

ENGINE = find_preset("qwen2.5-7b-910b4").engine
SPEC = ENGINE.instance_spec("a")
LONG_TOKENS = 16_000
LONG_S = ENGINE.costs.prefill_s(LONG_TOKENS, ENGINE.max_num_batched_tokens)


@dataclass
class Instance:
    """An engine without queue and cache in front, whose first tokens teach a model."""

    config: EngineConfig = ENGINE
    spec: InstanceSpec = SPEC
    model: LatencyModel = field(init=False)
    expected_s: dict[str, float] = field(default_factory=dict)
    ttft_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = LatencyModel.of(self.spec)
        self._engine = Engine(self.config)
        self._sent: dict[str, tuple[float, int, int, TtftParts]] = {}
        self._ahead_tokens = 0
        self._context_tokens = 0
        self._previous_s = 0.0
        self._work_since_s = 0.0

    def serve(self, requests: Iterable[tuple[float, int, int]]) -> Instance:
        """Times of arrival, prompt and output tokens; then until all are done."""
        for number, (at_s, prompt_tokens, output_tokens) in enumerate(sorted(requests)):
            self._advance(at_s)
            self._send(f"{at_s:.3f}/{number}", at_s, prompt_tokens, output_tokens)
        while (next_s := self._engine.next_event_s()) is not None:
            self._advance(next_s)
        return self

    def parts(self, now_s: float, prompt_tokens: int) -> TtftParts:
        latency = self.model.latency
        queueing_s = self._ahead_tokens * latency.mean_token_s(self._context_tokens)
        under_way_s = now_s - max(self._previous_s, self._work_since_s) if self._ahead_tokens else 0.0
        queueing_s = max(0.0, queueing_s - under_way_s)
        return latency.parts(queueing_s, self._ahead_tokens, prompt_tokens, 0, self._context_tokens)

    def expects_s(self, prompt_tokens: int) -> float:
        """Of a request that comes now, with nothing else to do."""
        return self.model.latency.expected_ttft_s(self.model.latency.parts(0.0, 0, prompt_tokens, 0, 0))

    def _send(self, request_id: str, now_s: float, prompt_tokens: int, output_tokens: int) -> None:
        parts = self.parts(now_s, prompt_tokens)
        self.expected_s[request_id] = self.model.latency.expected_ttft_s(parts)
        if not self._ahead_tokens:
            self._work_since_s = now_s
        self._sent[request_id] = now_s, prompt_tokens, output_tokens, parts
        self._ahead_tokens += prompt_tokens
        self._context_tokens += prompt_tokens + output_tokens
        self._engine.submit(EngineRequest(request_id, prompt_tokens, output_tokens), now_s)

    def _advance(self, until_s: float) -> None:
        for event in self._engine.advance(until_s):
            at_s, prompt_tokens, output_tokens, parts = self._sent[event.request_id]
            if event.kind is EventKind.FINISHED:
                self._context_tokens -= prompt_tokens + output_tokens
            if event.kind is not EventKind.FIRST_TOKEN:
                continue
            self._ahead_tokens -= prompt_tokens
            self.ttft_s[event.request_id] = event.time_s - at_s
            self.model = self.model.after(
                PrefillSample(
                    prompt_tokens,
                    0,
                    self._context_tokens,
                    round(1000 * at_s),
                    round(1000 * event.time_s),
                    round(1000 * self._previous_s),
                    round(1000 * (event.time_s - at_s)),
                    parts,
                )
            )
            self._previous_s = event.time_s

    def errors(self, first: int = 0) -> list[float]:
        """Relative errors of the expected TTFTs in order of arrival, from number ``first`` on."""
        return [
            abs(expected_s - self.ttft_s[request_id]) / self.ttft_s[request_id]
            for request_id, expected_s in list(self.expected_s.items())[first:]
        ]


def short_prompts(
    *, span_s: float = 60.0, least: int = 20, most: int = 400, rate_per_s: float = 6.0, seed: int = 1
) -> list[tuple[float, int, int]]:
    rng = random.Random(seed)
    return [(rng.uniform(0.0, span_s), rng.randint(least, most), 30) for _ in range(round(rate_per_s * span_s))]


def long_prompts(count: int, *, start_s: float = 0.0) -> list[tuple[float, int, int]]:
    return [(start_s + 5.0 * number, LONG_TOKENS, 20) for number in range(count)]


@pytest.mark.parametrize("most", [80, 150, 400, 1000])
def test_short_prompts_do_not_spoil_the_estimate_of_long_ones(most: int) -> None:
    instance = Instance().serve(short_prompts(most=most))

    assert instance.expects_s(LONG_TOKENS) == pytest.approx(LONG_S, rel=0.15)
    assert instance.model.latency.tokens_per_s == pytest.approx(SPEC.prefill_tokens_per_s, rel=0.15)


@pytest.mark.parametrize("overhead_s", [0.002, 0.03, 0.08])
def test_the_fixed_cost_of_a_step_is_told_from_the_rate(overhead_s: float) -> None:
    config = replace(ENGINE, costs=replace(ENGINE.costs, overhead_s=overhead_s, weights_s=0.0))
    instance = Instance(config).serve(short_prompts(least=300, most=1200, rate_per_s=2.0))

    long_s = config.costs.prefill_s(LONG_TOKENS, config.max_num_batched_tokens)
    assert instance.expects_s(LONG_TOKENS) == pytest.approx(long_s, rel=0.25)
    assert instance.expects_s(600) == pytest.approx(config.costs.prefill_s(600, 2048), rel=0.25)


@pytest.mark.parametrize(("wrong", "within"), [(0.2, 0.05), (0.4, 0.05), (3.0, 0.05), (10.0, 0.25)])
def test_a_wrong_prior_is_put_right_by_a_few_long_prompts(wrong: float, within: float) -> None:
    spec = replace(SPEC, prefill_tokens_per_s=SPEC.prefill_tokens_per_s * wrong)
    instance = Instance(spec=spec).serve(long_prompts(8))

    assert instance.expects_s(LONG_TOKENS) == pytest.approx(LONG_S, rel=within)
    assert instance.model.latency.tokens_per_s == pytest.approx(SPEC.prefill_tokens_per_s, rel=0.25)


def test_a_minute_of_short_prompts_forgets_nothing_of_long_ones() -> None:
    spec = replace(SPEC, prefill_tokens_per_s=2000.0)
    instance = Instance(spec=spec).serve(
        [*long_prompts(8), *((60.0 + at_s, *rest) for at_s, *rest in short_prompts(span_s=600.0))]
    )

    assert instance.expects_s(LONG_TOKENS) == pytest.approx(LONG_S, rel=0.1)


def test_queued_prompts_of_any_size_teach_the_rate_at_which_they_are_served() -> None:
    rng = random.Random(3)
    requests = [(rng.uniform(0.0, 120.0), rng.randint(50, 6000), 30) for _ in range(300)]
    instance = Instance().serve(requests)

    served_per_s = sum(tokens for _, tokens, _ in requests) / max(
        at_s + instance.ttft_s[request_id]
        for request_id, (at_s, _, _) in zip(instance.expected_s, sorted(requests), strict=True)
    )
    assert served_per_s > 7500, "they queue nearly all the time"
    assert instance.model.latency.tokens_per_s == pytest.approx(served_per_s, rel=0.1)
    assert sorted(instance.errors(100))[100] < 0.06


def test_bursts_of_short_prompts_that_end_together_are_one_time() -> None:
    requests = [(2.0 * burst, 400, 20) for burst in range(40) for _ in range(20)]
    instance = Instance().serve(requests)

    burst_s = 4 * ENGINE.costs.step_s(2048, 0, 0, 0)
    assert instance.model.latency.tokens_per_s == pytest.approx(8000 / burst_s, rel=0.1)


def test_decoding_that_shares_the_steps_is_told_from_prefill() -> None:
    rng = random.Random(5)
    decoding = [(0.1 * number, 3000, 6000) for number in range(100)]
    prompts = [(60.0 + 1.2 * number, rng.randint(600, 8000), 20) for number in range(150)]
    instance = Instance().serve([*decoding, *prompts])

    latency, costs = instance.model.latency, ENGINE.costs
    # The fleet counts the whole expected answer as context, and the engine's cost of each sequence comes on top.
    assert costs.context_token_s / 2 < latency.context_token_s < 2 * costs.context_token_s
    assert latency.token_s == pytest.approx(costs.token_s, rel=0.2)
    assert sorted(instance.errors(150))[50] < 0.1


def test_a_standstill_or_a_clock_that_jumped_teaches_next_to_nothing() -> None:
    instance = Instance().serve(long_prompts(10))
    before_s = instance.expects_s(LONG_TOKENS)

    parts = instance.parts(100.0, LONG_TOKENS)
    stalled = PrefillSample(LONG_TOKENS, 0, 0, 100_000, 3_700_000, 50_000, 3_600_000, parts)
    instance.model = instance.model.after(stalled)

    assert instance.expects_s(LONG_TOKENS) == pytest.approx(before_s, rel=0.02)


def test_now_and_then_a_wait_that_was_far_off_hardly_moves_the_others() -> None:
    model = LatencyModel.of(SPEC)
    for number in range(200):
        ttft_ms = 20_000 if number % 10 == 0 else 1100
        model = model.after(PrefillSample(100, 0, 0, 0, 0, 0, ttft_ms, TtftParts(500, 500, 100, 0)))

    assert model.latency.expected_ttft_s(TtftParts(500, 500, 100, 0)) == pytest.approx(1.1, rel=0.1)


def test_a_first_token_that_says_nothing_of_the_wait_teaches_the_prefill_alone() -> None:
    model = LatencyModel.of(SPEC)
    taught = model.after(PrefillSample(8000, 0, 0, 1000, 3000, 0, 9000, parts=None))

    assert taught.waiting == model.waiting
    assert taught.latency.token_s > model.latency.token_s


samples = st.builds(
    PrefillSample,
    uncached_tokens=st.integers(1, 200_000),
    cached_tokens=st.integers(0, 200_000),
    context_tokens=st.integers(0, 10_000_000),
    dispatched_ms=st.integers(0, 10_000_000),
    first_token_ms=st.integers(0, 10_000_000),
    previous_ms=st.integers(0, 10_000_000),
    ttft_ms=st.integers(0, 10_000_000),
    parts=st.none()
    | st.builds(
        TtftParts,
        queueing_ms=st.integers(0, 1_000_000),
        compute_ms=st.integers(0, 1_000_000),
        joining_ms=st.integers(0, 10_000),
        context_tokens=st.integers(0, 10_000_000),
    ),
)


@given(seen=st.lists(samples, max_size=30), tokens_per_s=st.floats(10.0, 1e6))
@settings(max_examples=50)
def test_whatever_it_is_told_it_stays_usable(seen: list[PrefillSample], tokens_per_s: float) -> None:
    model = LatencyModel.of(replace(SPEC, prefill_tokens_per_s=tokens_per_s))
    for sample in seen:
        model = model.after(sample)

    latency, prior = model.latency, model.prior
    assert Latency.from_floats(latency.floats()) == latency, "finite"
    assert prior.tokens_per_s / 1000 < latency.tokens_per_s or latency.typical_context_tokens > 0
    assert latency.tokens_per_s < 100 * prior.tokens_per_s
    assert 0.0 <= latency.expected_ttft_s(latency.parts(1.0, 1000, 1000, 0, 1000)) < float("inf")


def test_a_model_survives_as_floats_and_goes_on_learning_alike() -> None:
    instance = Instance().serve([*short_prompts(span_s=20.0, most=2000), *long_prompts(3, start_s=30.0)])
    model = instance.model
    restored = LatencyModel.from_floats(SPEC, model.floats())
    sample = PrefillSample(5000, 100, 20_000, 90_000, 91_000, 50_000, 1000, TtftParts(0, 700, 0, 20_000))

    assert restored == model
    assert restored.after(sample) == model.after(sample)


@pytest.mark.parametrize("spoil", [lambda floats: floats[1:], lambda floats: (*floats[1:], float("inf"))])
def test_floats_that_are_no_model_are_refused(spoil) -> None:
    with pytest.raises(ValueError, match="finite numbers"):
        LatencyModel.from_floats(SPEC, spoil(LatencyModel.of(SPEC).floats()))


def test_another_description_changes_what_is_not_yet_learned() -> None:
    faster = replace(SPEC, prefill_tokens_per_s=2 * SPEC.prefill_tokens_per_s)
    taught = Instance().serve(long_prompts(8)).model

    assert LatencyModel.of(SPEC).described_by(faster) == LatencyModel.of(faster)
    assert taught.described_by(SPEC) is taught
    assert taught.described_by(faster).latency.compute_s(LONG_TOKENS, 0, 0) == pytest.approx(LONG_S, rel=0.1)
