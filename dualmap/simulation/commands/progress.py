"""The progress bars of commands that take longer than two seconds: on standard error, and gone when they are done."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def progress_bars(quiet: bool = False, *, transient: bool = True) -> Progress:
    """Bars of steps done, steps in all and time; none where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=transient)


def by_name(progress: Progress) -> Callable[[str, int, int], None]:
    """A callback that shows a bar for each name; it is called with (name, done, total)."""
    tasks: dict[str, TaskID] = {}

    def on_step(name: str, done: int, total: int) -> None:
        if name not in tasks:
            tasks[name] = progress.add_task(name, total=total)
        progress.update(tasks[name], completed=done)

    return on_step


def over_runs(progress: Progress, runs: int, requests: int | None) -> Callable[[int, int], None]:
    """A callback that shows a bar of the requests of all runs; it is called with the place of a run and how many of its
    requests have arrived. Without a number of requests a run, the bar has no end."""
    task = progress.add_task(f"requests of {runs} runs", total=None if requests is None else runs * requests)
    counts = [0] * runs

    def on_arrivals(place: int, arrived: int) -> None:
        counts[place] = arrived
        progress.update(task, completed=sum(counts))

    return on_arrivals
