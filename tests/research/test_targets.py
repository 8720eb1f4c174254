import pytest

from dualmap.research.targets import MAIN, TARGETS, targets_of
from dualmap.simulation.errors import SimulationError
from tests.research.suites.samples import FIGURES


def test_the_main_target_is_always_searched_and_first() -> None:
    assert targets_of(()) == (MAIN,)
    assert [target.name for target in targets_of(("99", "90", "99"))] == ["90", "99"]


def test_a_target_reads_its_figure() -> None:
    assert (MAIN.share_of(FIGURES), TARGETS["both"].share_of(FIGURES)) == (0.9, 0.85)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(SimulationError, match="unknown target '80'; known are 90, 95, 99, both"):
        targets_of(("80",))
