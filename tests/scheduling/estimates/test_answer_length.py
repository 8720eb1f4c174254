import pytest

from dualmap.scheduling.estimates.answer_length import (
    CLASSES,
    PRIOR_MEANS,
    AnswerLengths,
    class_of,
    expected_answer_tokens,
)
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.learning import EndSample, FleetLearner, Sample, finished_note


@pytest.mark.parametrize(
    ("limit", "kind"), [(1, 0), (64, 0), (65, 1), (256, 1), (4096, 3), (4097, 4), (10**6, 4), (None, 5), (0, 5)]
)
def test_requests_with_similar_limits_are_of_one_class(limit: int | None, kind: int) -> None:
    assert class_of(limit) == kind


def test_before_anything_is_learned_an_answer_has_256_tokens_or_its_limit() -> None:
    assert [expected_answer_tokens(PRIOR_MEANS, limit) for limit in (None, 9, 100, 8000)] == [256, 9, 100, 256]


def test_the_mean_of_each_class_is_learned_apart() -> None:
    lengths = AnswerLengths()
    for _ in range(500):
        lengths.add(None, 40)
        lengths.add(8000, 2000)

    means = lengths.means

    assert expected_answer_tokens(means, None) == pytest.approx(40, abs=10)
    assert expected_answer_tokens(means, 8000) == pytest.approx(2000, rel=0.05)
    assert expected_answer_tokens(means, 100) == 100, "nothing was seen of that class"


def test_former_traffic_fades() -> None:
    lengths = AnswerLengths()
    for tokens in (1000, 50):
        for _ in range(10_000):
            lengths.add(None, tokens)

    assert lengths.means[-1] < 100


def test_an_answer_is_expected_to_have_a_token_at_least() -> None:
    assert expected_answer_tokens([0.0] * CLASSES, None) == 1


def test_the_leader_learns_answers_from_ends_and_publishes_their_means() -> None:
    learner = FleetLearner(Learned())

    learner.learn([Sample(str(n), EndSample(answer_tokens=1000, output_limit=4096)) for n in range(400)], {}, {}, 0)

    assert expected_answer_tokens(learner.learned.answer_tokens, 4000) == pytest.approx(1000, rel=0.1)
    assert expected_answer_tokens(learner.learned.answer_tokens, None) == 256
    assert learner.learned.bytes_per_token == Learned().bytes_per_token


def test_what_teaches_nothing_is_not_noted() -> None:
    assert finished_note(500, 0, 0, 100) == finished_note(0, 90, 0, 0) == ""
    assert "500" in finished_note(500, 100, 0, 0)
    assert "70" in finished_note(0, 0, 70, 0)
