"""Options of both commands: the bench that runs are made on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualmap.research.bench import Bench
from dualmap.research.run_cache import RunCache
from dualmap.simulation.commands.options import add_output_arguments
from dualmap.simulation.commands.progress import by_name, progress_bars


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache", type=Path, default=Path(".laboratory"), metavar="DIR",
        help="figures of former runs; a change of code or settings reruns what it affects",
    )  # fmt: skip
    add_output_arguments(parser)


@contextmanager
def bench_of(arguments: argparse.Namespace) -> Iterator[Bench]:
    """A bench whose progress is shown until the end of the block."""
    with progress_bars(arguments.quiet, transient=False) as progress:
        yield Bench(arguments.workers, RunCache(arguments.cache), by_name(progress))
