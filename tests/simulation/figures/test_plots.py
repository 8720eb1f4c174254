import builtins
import re
import sys
from collections.abc import Mapping

import pytest

from dualmap.runtime.extras import how_to_install
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.figures import plots
from dualmap.simulation.figures.results import RunResult
from dualmap.simulation.virtual_time.scenario import Scenario
from dualmap.simulation.virtual_time.simulate import simulate
from dualmap.simulation.workload.sources import TraceSource


@pytest.fixture(scope="module")
def runs() -> list[RunResult]:
    scenario = Scenario(SchedulingSettings(policy="dualmap"), find_preset("qwen2.5-7b-910b4").engine, instances=2)
    return [simulate(TraceSource("uniform", requests=60).load(rate), scenario) for rate in (2.0, 6.0)]


def test_every_plot_is_a_drawing_that_names_its_axes(runs: list[RunResult]) -> None:
    drawn = plots.run_plots(runs)

    assert set(drawn) == {
        "on-time-share", "ttft-p90", "e2e-p90", "hit-rate", "pending-tokens", "load-cv", "key-length", "first-tokens",
    }  # fmt: skip
    for svg in drawn.values():
        assert svg.rstrip().endswith("</svg>")
    assert "requests/s" in drawn["on-time-share"]


def test_one_rate_has_nothing_to_draw_over_rates(runs: list[RunResult]) -> None:
    assert "on-time-share" not in plots.run_plots(runs[:1])


def test_the_same_figures_give_the_same_text(runs: list[RunResult]) -> None:
    assert plots.run_plots(runs) == plots.run_plots(runs)


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: object, **options: Mapping[str, object]) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)

    with pytest.raises(plots.PlottingUnavailableError, match=re.escape(how_to_install("evaluation"))):
        plots.require_matplotlib()
