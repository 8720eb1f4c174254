"""Plots of results, as SVG text; matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualmap.runtime.extras import how_to_install
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.figures.results import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes"], None]
Series = tuple[Sequence[float], Sequence[float]]
OfPending = Callable[[tuple[int, ...]], float]
"""A figure of the instances' pending tokens at one moment."""

STYLES: Mapping[str, tuple[str, str]] = {
    "dualmap-least-cost": ("#6a040f", "-"),
    "dualmap": ("#c1121f", "-"),
    "dualmap-no-rebalance": ("#e76f51", "--"),
    "dualmap-min-ttft": ("#f4a261", "--"),
    "dualmap-least-loaded": ("#e9c46a", "--"),
    "dualmap-cache-affinity": ("#b08968", "--"),
    "cache-affinity": ("#264653", ":"),
    "round-robin": ("#999999", ":"),
    "least-loaded": ("#555555", ":"),
    "min-ttft": ("#2a9d8f", "-"),
    "preble": ("#3a86ff", "-"),
    "dynamo": ("#8338ec", "-"),
    "sglang": ("#06d6a0", "-"),
    "llm-d": ("#118ab2", "-"),
    "llm-d-latency": ("#073b4c", "-"),
}


class PlottingUnavailableError(SimulationError):
    """matplotlib is not installed."""


def require_matplotlib() -> None:
    """Raises PlottingUnavailableError."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlottingUnavailableError(f"plots need matplotlib: {how_to_install('evaluation')}") from error


def svg(draw: Draw, *, width: float = 5.2, height: float = 3.4, grid: bool = True) -> str:
    """One plot; the same input gives the same text."""
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {"svg.hashsalt": "dualmap", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        if grid:
            axes.grid(visible=True, alpha=0.25)
        buffer = io.StringIO()
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None})
    return buffer.getvalue()


def lines(
    series: Mapping[str, Series],
    *,
    x: str,
    y: str,
    title: str = "",
    log_y: bool = False,
    markers: bool = True,
    levels: Mapping[str, float] | None = None,
) -> str:
    """One line per name; ``levels`` are drawn across as references."""

    def draw(axes: Axes) -> None:
        for name, (xs, ys) in series.items():
            color, dashes = STYLES.get(name, (None, "-"))
            axes.plot(xs, ys, dashes, label=name, color=color, marker="." if markers else "", linewidth=1.3)
        for name, level in (levels or {}).items():
            axes.axhline(level, color="black", linewidth=0.8, linestyle="--", label=name)
        if log_y:
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y, title=title)
        if len(series) + len(levels or {}) > 1:
            axes.legend(fontsize=6, ncols=2)

    return svg(draw)


def bars(values: Mapping[str, float], *, y: str, title: str = "", levels: Mapping[str, float] | None = None) -> str:
    def draw(axes: Axes) -> None:
        colors = [STYLES.get(name, ("#3a86ff", ""))[0] for name in values]
        axes.bar(list(values), list(values.values()), color=colors)
        for name, level in (levels or {}).items():
            axes.axhline(level, color="black", linewidth=0.8, linestyle="--", label=name)
        if levels:
            axes.legend(fontsize=7)
        axes.tick_params(axis="x", rotation=60)
        axes.set(ylabel=y, title=title)

    return svg(draw)


def points(values: Mapping[str, tuple[float, float]], *, x: str, y: str, title: str = "") -> str:
    """One named point each."""

    def draw(axes: Axes) -> None:
        for name, (at_x, at_y) in values.items():
            axes.scatter([at_x], [at_y], color=STYLES.get(name, (None, ""))[0], label=name, s=28)
            axes.annotate(name, (at_x, at_y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.set(xlabel=x, ylabel=y, title=title)

    return svg(draw)


def heat(rows: Sequence[Sequence[float]], *, x: str, y: str, label: str, highest: float, width_s: float) -> str:
    """One row each, over time; colours up to ``highest``, so that plots can be compared."""

    def draw(axes: Axes) -> None:
        span_s = width_s * max(map(len, rows), default=1)
        extent = (0.0, span_s, len(rows) + 0.5, 0.5)
        image = axes.imshow(rows, aspect="auto", cmap="inferno", vmin=0.0, vmax=highest, extent=extent)
        axes.figure.colorbar(image, ax=axes, label=label)
        axes.set(xlabel=x, ylabel=y)

    return svg(draw, grid=False)


def run_plots(results: Iterable[RunResult]) -> dict[str, str]:
    """The plots of ``dualmap simulate``, by name."""
    runs = list(results)
    plots: dict[str, str] = {}
    if len({run.rate_per_s for run in runs}) > 1:
        plots["on-time-share"] = over_rates(runs, lambda run: run.effective_capacity, "share on time")
        plots["ttft-p90"] = over_rates(runs, lambda run: run.ttft_s.p90, "P90 TTFT, s", log_y=True)
        plots["e2e-p90"] = over_rates(runs, lambda run: run.e2e_s.p90, "P90 end to end, s", log_y=True)
        plots["hit-rate"] = over_rates(runs, lambda run: run.hit_rate, "hit rate")
    rate = max(run.rate_per_s for run in runs)
    at_rate = {run.policy: run for run in runs if run.rate_per_s == rate}
    title = f"{rate:.1f} requests/s"
    plots["pending-tokens"] = lines(
        {
            name: ([s.time_s for s in run.samples], [sum(s.pending_tokens) / 1000 for s in run.samples])
            for name, run in at_rate.items()
        },
        x="time, s", y="pending tokens, thousands", title=title, markers=False,
    )  # fmt: skip
    plots["first-tokens"] = lines(
        {
            name: ([at_s for at_s, _, _ in run.timeline], [p90_s for _, _, p90_s in run.timeline])
            for name, run in at_rate.items()
        },
        x="time, s", y="P90 of first tokens, s", title=title, markers=False, log_y=True,
    )  # fmt: skip
    plots["load-cv"] = lines(
        {name: ([s.time_s for s in run.samples], [s.cv for s in run.samples]) for name, run in at_rate.items()},
        x="time, s", y="CV of pending tokens", title=title, markers=False,
    )  # fmt: skip
    first = next(iter(at_rate.values()))
    total = sum(first.key_blocks.values())
    plots["key-length"] = bars(
        {str(blocks): count / total for blocks, count in first.key_blocks.items()},
        y="share of requests", title=f"hash-key length in blocks ({first.policy})",
    )  # fmt: skip
    return plots


def over_rates(
    runs: Sequence[RunResult], figure: Callable[[RunResult], float], y: str, *, title: str = "", log_y: bool = False
) -> str:
    """One line a policy over the arrival rate."""
    series: dict[str, Series] = {}
    for policy in dict.fromkeys(run.policy for run in runs):
        own = sorted((run.rate_per_s, figure(run)) for run in runs if run.policy == policy)
        series[policy] = ([rate for rate, _ in own], [value for _, value in own])
    return lines(series, x="requests/s", y=y, title=title, log_y=log_y)
