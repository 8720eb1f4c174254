from random import Random

import pytest

from dualmap.simulation.workload.generators.quantiles import QuantileTable, kind_at


def test_samples_reproduce_the_quantiles() -> None:
    table = QuantileTable(((0, 1), (0.5, 10), (0.9, 100), (1, 1000)))
    rng = Random(1)

    values = sorted(table.sample(rng) for _ in range(20_000))

    assert values[10_000] == pytest.approx(10, rel=0.05)
    assert values[18_000] == pytest.approx(100, rel=0.1)
    assert values[0] >= 1
    assert values[-1] <= 1000


def test_values_may_be_negative() -> None:
    assert QuantileTable(((0, -10), (0.5, 0), (1, 8))).value(0.25) == -5


def test_the_ends_are_the_smallest_and_the_largest_value() -> None:
    table = QuantileTable(((0, 2), (0.5, 4), (1, 8)))

    assert (table.value(0), table.value(1)) == (2, 8)


@pytest.mark.parametrize("points", [((0, 1), (0.9, 2)), ((0.1, 1), (1, 2)), ((0, 2), (1, 1)), ((0, 1), (0, 1), (1, 2))])
def test_a_table_that_is_no_distribution_is_refused(points: tuple[tuple[float, float], ...]) -> None:
    with pytest.raises(ValueError, match="must"):
        QuantileTable(points)


@pytest.mark.parametrize(("probability", "place"), [(0.0, 0), (0.59, 0), (0.6, 1), (0.89, 1), (0.95, 2), (1.0, 2)])
def test_a_kind_is_drawn_by_its_share(probability: float, place: int) -> None:
    assert kind_at(probability, [(0.6, "a"), (0.3, "b"), (0.1, "c")]) == place
