"""The figures that the leader learns from samples."""

from __future__ import annotations

import json

import pytest

from dualmap.scheduling.estimates.adapter_prices import LEAST_PRICE, MOST_PRICE
from dualmap.scheduling.estimates.learned import PRIOR_IMAGE_TOKENS, Learned
from dualmap.scheduling.estimates.learning import (
    MIN_IMAGES,
    RATIO_MIN_TOKENS,
    EndSample,
    FirstTokenSample,
    FleetLearner,
    Sample,
    features_to_note,
    transfer_note,
)
from dualmap.scheduling.estimates.ttft_model import PRIOR_WEIGHTS
from dualmap.scheduling.estimates.weights import Form
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState, Role


def first_token(instance_id: str, tokens: int, busy_ms: int, *, at_ms: int = 1_000_000, **changes: object) -> Sample:
    figures = {"former_ms": 0, "features": None, **changes}
    return Sample("1", FirstTokenSample(instance_id, tokens, at_ms, at_ms, prefilled_ms=at_ms + busy_ms, **figures))


def loads(**tokens_per_s: float) -> dict[str, InstanceLoad]:
    return {
        name: InstanceLoad(name, InstanceState.READY, prefill_tokens_per_s=rate) for name, rate in tokens_per_s.items()
    }


def lengths(*prompts: tuple[int, int]) -> list[Sample]:
    return [Sample("1", EndSample(text_bytes, tokens)) for text_bytes, tokens in prompts]


def ratios(*prompts: tuple[int, int]) -> list[float]:
    """Bytes per token as published after each prompt."""
    learner, seen = FleetLearner(Learned()), []
    for sample in lengths(*prompts):
        learner.learn([sample], {}, {}, 0)
        seen.append(learner.learned.bytes_per_token)
    return seen


def instances(*names: str, role: Role = Role.MIXED) -> dict[str, InstanceSpec]:
    return {name: InstanceSpec(name, f"http://{name}", role, prefill_tokens_per_s=1000.0) for name in names}


def test_prefill_rates_are_learned_for_each_role_from_what_is_published() -> None:
    learner = FleetLearner(Learned())
    samples = [first_token("a", 4000, 2000)] * 60 + [first_token("p", 5000, 10_000)] * 60
    known = instances("a", "idle") | instances("p", role=Role.PREFILL) | instances("d", role=Role.DECODE)

    rates = learner.learn(samples, loads(a=1000.0, idle=7.0, p=1000.0, d=9.0), known, 1_000_000)

    assert rates == {
        "a": pytest.approx(2000, rel=0.05), "idle": rates["a"], "p": pytest.approx(500, rel=0.05)
    }  # fmt: skip


def test_peers_that_are_equally_fast_are_published_as_exactly_equal() -> None:
    learner, published = FleetLearner(Learned()), {"a": 1000.0, "b": 1000.0}
    for busy_ms in (2000, 2010, 2020, 1000, 1005):
        samples = [first_token("a", 4000, busy_ms), first_token("b", 4000, busy_ms + 90)]
        changed = learner.learn(samples, loads(**published), instances("a", "b"), 1_000_000)
        assert changed.keys() in (set(), {"a", "b"})
        published |= changed
        assert published["a"] == published["b"]


def test_a_rate_is_published_where_time_changes_it_and_not_where_nothing_does() -> None:
    learner, published = FleetLearner(Learned()), {"a": 1000.0, "b": 1000.0}
    for _ in range(30):
        samples = [first_token("a", 4000, 2000), first_token("b", 4000, 6000)]
        published |= learner.learn(samples, loads(**published), instances("a", "b"), 1_000_000)
    assert published["b"] < 0.75 * published["a"]

    assert learner.learn([], loads(**published), instances("a", "b"), 1_006_000) == {}
    published |= learner.learn([], loads(**published), instances("a", "b"), 1_030_000)

    assert published["a"] == published["b"]


def test_busy_time_begins_with_the_end_of_the_former_prefill() -> None:
    samples = [first_token("a", 1000, 900, former_ms=1_000_400)] * 60

    rates = FleetLearner(Learned()).learn(samples, loads(a=1000.0), instances("a"), 1_000_000)

    assert rates["a"] == pytest.approx(2000, rel=0.05)


def test_the_time_in_which_an_unseen_prefill_has_a_part_teaches_no_rate() -> None:
    samples = [first_token("a", 4000, 2000, unseen=1)] * 60

    assert FleetLearner(Learned()).learn(samples, loads(a=1000.0), instances("a"), 1_000_000) == {}


def test_an_instance_that_left_teaches_nothing() -> None:
    learner = FleetLearner(Learned())
    samples = [first_token("gone", 1, 1000, features=(1.0, 0.0, 9.0, 0.0, 0.0))]

    assert learner.learn(samples, loads(a=1.0), instances("a"), 1_000_000) == {}
    assert learner.learned == Learned()


def test_an_instance_that_was_forgotten_begins_again_as_fast_as_its_peers() -> None:
    learner, published = FleetLearner(Learned()), {"a": 1000.0, "b": 1000.0}
    for _ in range(30):
        samples = [first_token("a", 4000, 2000), first_token("b", 4000, 6000)]
        published |= learner.learn(samples, loads(**published), instances("a", "b"), 1_000_000)

    learner.forget_all_but({"a"})
    published |= learner.learn([], loads(a=published["a"], b=9000.0), instances("a", "b"), 1_000_000)

    assert published["a"] == published["b"]


def test_the_ttft_is_learned_from_first_tokens_with_features_alone() -> None:
    features = features_to_note(Form(1.0, ahead_s=0.5, compute_s=0.5, attention_pairs=2e7, kv_demand=0.1))
    learner = FleetLearner(Learned())

    learner.learn([first_token("a", 4000, 9000)] * 60, loads(a=8000.0), instances("a"), 1_000_000)
    assert learner.learned.ttft_weights == PRIOR_WEIGHTS
    learner.learn([first_token("a", 4000, 1600, features=features)] * 60, loads(a=8000.0), instances("a"), 1_000_000)

    expected_s = sum(weight * part for weight, part in zip(learner.learned.ttft_weights, features, strict=True))
    assert expected_s == pytest.approx(1.6, rel=0.05)


def test_the_wait_for_a_slot_follows_how_long_answers_take() -> None:
    learner = FleetLearner(Learned())
    ended = EndSample(tokens=900, answer_tokens=101, answer_ms=2000)

    learner.learn([Sample("1-0", ended)] * 400, {}, {}, 0)

    assert learner.learned.answer_s == pytest.approx(2.0, rel=0.01)
    assert learner.learned.ttft.slot_turns == learner.learned.answer_s


def loading_adapter(host_s: float, disk_s: float) -> tuple[float, ...]:
    return features_to_note(
        Form(1.0, ahead_s=0.5, compute_s=0.5, kv_demand=0.1, adapter_host_s=host_s, adapter_disk_s=disk_s)
    )


def test_loads_of_adapters_are_priced_by_first_tokens_that_waited_for_them() -> None:
    learner = FleetLearner(Learned())
    plain = features_to_note(Form(1.0, ahead_s=0.5, compute_s=0.5, kv_demand=0.1))
    samples = [
        first_token("a", 100, 1000, features=plain),
        first_token("a", 100, 1600, features=loading_adapter(0.3, 0.0)),  # twice as long as described
        first_token("a", 100, 5600, features=loading_adapter(0.3, 1.0)),  # the disk takes four times as long
    ]
    for _ in range(60):
        learner.learn(samples, loads(a=8000.0), instances("a"), 10**6)

    learned = learner.learned
    assert learned.adapter_prices == pytest.approx((2.0, 4.0), rel=0.2)
    assert (learned.ttft.adapter_host_s, learned.ttft.adapter_disk_s) == learned.adapter_prices
    assert learned.ttft.of(Form(1.0, ahead_s=0.5, compute_s=0.5, kv_demand=0.1)) == pytest.approx(1.0, rel=0.1)


def test_a_first_token_that_came_absurdly_late_or_early_bounds_the_price_of_a_load() -> None:
    for ended_ms, least, most in ((3_600_000, 10.0, MOST_PRICE), (1, LEAST_PRICE, 0.2)):
        learner, features = FleetLearner(Learned()), loading_adapter(0.1, 9.0)
        learner.learn([first_token("a", 100, ended_ms, features=features)] * 99, loads(a=8000.0), instances("a"), 10**6)

        assert least <= learner.learned.adapter_prices[1] <= most


def test_the_time_of_a_load_is_no_time_of_computing() -> None:
    plain = features_to_note(Form(1.0, ahead_s=0.5, compute_s=0.5, kv_demand=0.1))
    loading = features_to_note(Form(1.0, ahead_s=0.5, compute_s=0.5, kv_demand=0.1, load_s=2.0))
    learners = [FleetLearner(Learned()), FleetLearner(Learned())]
    for learner, ended_ms, features in zip(learners, (1600, 3600), (plain, loading), strict=True):
        learner.learn([first_token("a", 100, ended_ms, features=features)] * 30, loads(a=8000.0), instances("a"), 10**6)
    slow = [first_token("a", 4000, 3600, features=loading)] * 60

    assert learners[0].learned.ttft_weights == pytest.approx(learners[1].learned.ttft_weights)
    assert learners[1].learn(slow, loads(a=8000.0), instances("a"), 10**6) == {}
    assert learners[1].learned.ttft.load_s == 1.0


def test_what_is_published_expects_what_the_model_does() -> None:
    weights, features = (0.1, 1.2, 0.8, 0.5, 0.3), Form(1.0, 3.0, 9.0, 0.5, 2.0, 900, 4e7, 1.0, 0.0, 1.0)

    expected_s = sum(weight * part for weight, part in zip(weights, features_to_note(features), strict=True))

    assert Learned(4.0, weights).ttft.of(features) == pytest.approx(expected_s)


def test_a_new_leader_starts_from_what_was_published() -> None:
    published = Learned(3.0, (0.1, 1.2, 0.8, 0.5, 0.3))
    learner = FleetLearner(published)

    learner.learn([], {}, {}, 0)

    assert learner.learned == published


def test_bytes_per_token_change_only_when_they_moved_by_a_tenth() -> None:
    assert ratios((84_000, 20_000), (40_000, 20_000), (60_000, 20_000)) == [4.0, pytest.approx(3.1), pytest.approx(3.1)]


def test_the_prior_is_kept_until_enough_was_seen() -> None:
    least = RATIO_MIN_TOKENS // 2

    assert ratios((least, least), (least, least)) == [4.0, 1.0]


def test_the_least_ratio_can_be_divided_by() -> None:
    assert ratios((1, 20_000)) == [0.001]


def test_prompts_of_long_ago_count_half() -> None:
    assert ratios((16_000_003, 4_000_001), (2_000_000, 1_999_999)) == [4.0, 10_000_001 / 3_999_999]


def image_tokens(*prompts: tuple[int, int, int]) -> list[float]:
    """As published after each prompt of so many text bytes, tokens and images."""
    learner, seen = FleetLearner(Learned(bytes_per_token=4.0)), []
    for text_bytes, tokens, images in prompts:
        learner.learn([Sample("1", EndSample(text_bytes, tokens, images=images))], {}, {}, 0)
        seen.append(learner.learned.image_tokens)
    assert learner.learned.bytes_per_token == 4.0, "images say nothing about text"
    return seen


def test_an_image_has_the_tokens_that_its_prompt_has_beyond_its_text() -> None:
    assert image_tokens((4000, 2000, MIN_IMAGES - 1), (400, 400, 1)) == [PRIOR_IMAGE_TOKENS, 1300 / MIN_IMAGES]


def test_tokens_of_images_change_only_when_they_moved_by_a_tenth_and_are_never_negative() -> None:
    assert image_tokens((4, 10_001, 10), (4, 11_501, 10), (4, 501, 10)) == [1024, 1024, 22_000 / 30]
    assert image_tokens((8000, 1000, 10)) == [0.0]


def test_images_of_long_ago_count_half() -> None:
    assert image_tokens((4, 1001 * 500 + 1, 1001), (4, 500 * 1500 + 1, 500)) == [
        pytest.approx(500, rel=0.01), pytest.approx(1000, rel=0.01)
    ]  # fmt: skip


def test_the_first_tokens_of_decode_legs_teach_what_a_transfer_takes() -> None:
    learner = FleetLearner(Learned())
    notes = [transfer_note(0.1 + tokens / 100_000, tokens) for tokens in (1_000, 30_000)] * 20

    learner.learn([Sample("1", EndSample.of_note(json.loads(note))) for note in notes], {}, {}, 0)

    assert learner.learned.transfer == (pytest.approx(0.1, abs=0.02), pytest.approx(1e-5, rel=0.1))
