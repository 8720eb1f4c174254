import pytest

from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings

BY_LENGTH = SchedulingSettings(slo_ttft_s=5.0, slo_ttft_s_per_1k_tokens=0.5, slo_ttft_max_s=30.0)


@pytest.mark.parametrize(("prompt_tokens", "expected_s"), [(0, 5.0), (300, 5.15), (20_000, 15.0), (100_000, 30.0)])
def test_an_slo_grows_with_the_prompt_up_to_its_limit(prompt_tokens: int, expected_s: float) -> None:
    assert slo_s(BY_LENGTH, prompt_tokens) == pytest.approx(expected_s)


def test_by_default_prompts_of_all_lengths_have_one_slo() -> None:
    assert {slo_s(SchedulingSettings(), tokens) for tokens in (1, 1_000, 1_000_000)} == {5.0}


@pytest.mark.parametrize("requested_s", [0.001, 2.0, 600.0])
def test_a_request_s_own_slo_counts_whatever_its_length(requested_s: float) -> None:
    assert slo_s(BY_LENGTH, 100_000, requested_s) == requested_s


def test_the_slo_of_a_class_counts_for_requests_without_one_of_their_own() -> None:
    classes = (PriorityClassSettings(name="high", slo_ttft_s=2.0), PriorityClassSettings(name="low"))
    settings = BY_LENGTH.model_copy(update={"classes": classes})

    assert [slo_s(settings, 20_000, requested_s, rank) for requested_s in (None, 1.0) for rank in (0, 1)] == [
        2.0, 15.0, 1.0, 1.0,
    ]  # fmt: skip


def test_the_limit_of_what_length_adds_takes_nothing_from_the_base() -> None:
    settings = SchedulingSettings(slo_ttft_s=120.0, slo_ttft_s_per_1k_tokens=0.5, slo_ttft_max_s=30.0)

    assert slo_s(settings, 100_000) == 120.0
