from statistics import stdev

import pytest

from dualmap.research.confidence import Comparison, Ranking
from dualmap.simulation.figures.mean import Mean


def test_the_interval_is_students() -> None:
    # Given the textbook sample 1..5: mean 3, standard deviation 1.5811, t(4) = 2.776.
    mean = Mean.of([1, 2, 3, 4, 5])

    assert mean.value == 3
    assert mean.half_width == pytest.approx(2.776 * 1.58114 / 5**0.5, rel=1e-4)


@pytest.mark.parametrize(("count", "quantile"), [(28, 2.052), (30, 2.045), (40, 2.023), (62, 2.000), (1000, 1.962)])
def test_the_quantile_follows_the_number_of_values(count: int, quantile: float) -> None:
    values = [0.0, 1.0] * (count // 2)

    assert Mean.of(values).half_width == pytest.approx(quantile * stdev(values) / count**0.5, rel=3e-4)


def test_one_value_has_no_interval_and_none_no_mean() -> None:
    assert Mean.of([7.0]) == Mean(7.0, 0.0, (7.0,))
    with pytest.raises(ValueError, match="at least one value"):
        Mean.of([])


def test_an_infinite_value_makes_the_mean_infinite() -> None:
    assert Mean.of([1.0, float("inf")]).value == float("inf")


def test_a_ranking_that_holds_is_the_same_in_every_seed() -> None:
    ranking = Ranking.of({"a": (3.0, 9.0), "b": (2.0, 8.0), "c": (1.0, 7.0)})

    assert ranking.orders == ((("a",), ("b",), ("c",)),) * 2
    assert ranking.holds and ranking.winner_holds


def test_a_winner_may_hold_while_the_order_behind_does_not() -> None:
    ranking = Ranking.of({"a": (3.0, 9.0), "b": (2.0, 7.0), "c": (1.0, 8.0)})

    assert ranking.winner_holds and not ranking.holds
    assert ranking.firsts == {"a": 2}


def test_where_small_is_good_the_smallest_is_first() -> None:
    assert Ranking.of({"a": (3.0,), "b": (2.0,)}, highest_first=False).orders == ((("b",), ("a",)),)


def test_equal_figures_share_a_place() -> None:
    ranking = Ranking.of({"b": (1.0, 3.0), "a": (1.0, 2.0), "c": (0.0, 0.0)})

    assert ranking.orders[0] == (("b", "a"), ("c",))
    assert ranking.firsts == {"b": 2, "a": 1}
    assert ranking.winner_holds and not ranking.holds


def test_the_first_is_compared_with_the_best_other_seed_by_seed() -> None:
    found = Comparison.of({"ours": (0.6, 0.9), "worse": (0.1, 0.1), "best": (0.5, 0.6)})

    assert (found.first, found.best_other) == ("ours", "best")
    assert found.percent is not None
    assert found.percent.values == pytest.approx((20.0, 50.0))
    assert found.points.values == pytest.approx((10.0, 30.0))


def test_where_small_is_good_the_best_other_is_the_smallest() -> None:
    found = Comparison.of({"ours": (2.0,), "slow": (9.0,), "fast": (4.0,)}, highest_best=False)

    assert found.best_other == "fast"
    assert found.percent == Mean.of([-50.0])


def test_nothing_is_a_share_of_nothing_and_one_has_no_other() -> None:
    assert Comparison.of({"ours": (1.0, 2.0), "other": (0.0, 1.0)}).percent is None
    with pytest.raises(ValueError, match=r"empty|at least one"):
        Comparison.of({"ours": (1.0,)})
