"""``dualmap record``: what replicas recorded, as one trace to simulate and to replay."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.commands.options import OptionError, exit_code, write_whole
from dualmap.simulation.commands.progress import progress_bars
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.workload.recording import merge_recordings, render_mooncake
from dualmap.simulation.workload.trace_figures import trace_figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording", nargs="+", type=Path, metavar="RECORDING",
        help="files that replicas wrote, or folders of them (see router.record_dir)",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace, as Mooncake JSONL")


def run(arguments: argparse.Namespace, scheduling: SchedulingSettings, engine: EngineSettings) -> int:
    return exit_code("record", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    paths = [path for given in arguments.recording for path in _files(given)]
    if arguments.out in paths:
        raise OptionError(f"--out {arguments.out} is one of the recordings")
    with progress_bars() as progress:
        task = progress.add_task("bytes read", total=sum(path.stat().st_size for path in paths if path.is_file()))
        trace = merge_recordings(paths, read=lambda count: progress.advance(task, count))
        progress.add_task("writing the trace", total=None)
        write_whole(arguments.out, render_mooncake(trace))
        figures = trace_figures(trace)
    Console().print(
        f"{figures.requests:,} requests at {figures.rate_per_s:.2f}/s, {trace.block_tokens} tokens a block, mean input "
        f"{figures.mean_input_tokens:,.0f} and output {figures.mean_output_tokens:,.0f} tokens, an endless cache would "
        f"hit {figures.infinite_cache_hit:.1%}: {arguments.out}",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _files(given: Path) -> list[Path]:
    if not given.is_dir():
        return [given]
    files = sorted(given.glob("*.jsonl"))
    if not files:
        raise OptionError(f"{given}: no *.jsonl in this folder")
    return files
