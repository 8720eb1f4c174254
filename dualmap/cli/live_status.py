"""The live status of ``dualmap up``: a table that refreshes on a terminal, a line at intervals elsewhere."""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dualmap.cli.figures import FleetFigures

STATE_STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "down": "red", "standby": "dim"}


class LiveStatus:
    """Shows figures as they come; messages appear above the table without tearing it."""

    def __init__(self, console: Console, line_every: int) -> None:
        self._console = console
        self._line_every = line_every
        self._shown = 0
        self._last_line = ""
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> LiveStatus:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.__exit__(None, None, None)

    def say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def show(self, figures: FleetFigures) -> None:
        """Renew the table; off a terminal print a line every ``line_every`` calls, unless nothing changed."""
        if self._live:
            self._live.update(table(figures), refresh=True)
            return
        text = line(figures)
        if self._shown % self._line_every == 0 and text != self._last_line:
            self.say(text)
            self._last_line = text
        self._shown += 1


def table(figures: FleetFigures) -> RenderableType:
    """Instances as rows, the fleet's own figures under them."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("instance")
    rows.add_column("state")
    for heading in ("pending tokens", "held", "running", "cached blocks"):
        rows.add_column(heading, justify="right")
    for instance in figures.instances:
        rows.add_row(
            instance.instance_id,
            Text(instance.state, STATE_STYLES.get(instance.state, "")),
            f"{instance.pending_tokens:,}",
            f"{instance.held:,}",
            f"{instance.running:,}",
            f"{instance.cached_blocks:,}",
        )
    return Group("", rows, "", *(Text(" · ".join(facts), "dim") for facts in (_traffic(figures), _fleet(figures))))


def line(figures: FleetFigures) -> str:
    """The figures in one line."""
    ready = sum(instance.state == "ready" for instance in figures.instances)
    sums = (
        f"instances {ready}/{len(figures.instances)} ready",
        f"pending tokens {figures.pending_tokens:,}",
        f"held {figures.held:,}",
    )
    return " · ".join((*sums, *_traffic(figures), *_fleet(figures)))


def _traffic(figures: FleetFigures) -> tuple[str, ...]:
    return (
        f"requests {figures.counts.requests:,} ({figures.requests_per_s:.1f}/s, {figures.counts.failed:,} failed)",
        f"hit rate {_percent(figures.hit_rate)}",
        f"on time {_percent(figures.on_time_share)}" + (f" ({figures.overdue:,} overdue)" if figures.overdue else ""),
    )


def _fleet(figures: FleetFigures) -> tuple[str, ...]:
    return (
        f"leader {figures.leader or 'none'}",
        f"replicas {figures.replicas}",
        f"migrations {figures.migrations:,}",
    )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
