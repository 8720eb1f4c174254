"""``dualmap replay``: a trace through a live endpoint, with a progress bar, a table and JSON at the end."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.commands.options import (
    OptionError,
    add_loop_arguments,
    add_trace_arguments,
    exit_code,
    loop_of,
    trace_source,
    write_whole,
)
from dualmap.simulation.figures.on_time import TPOT_SLO_S
from dualmap.simulation.figures.terminal import terminal
from dualmap.simulation.replay.replay import ReplayOptions, ReplayProgress, replay
from dualmap.simulation.replay.replay_bodies import Endpoint
from dualmap.simulation.replay.replay_report import ReplayRecord, record_lines, report_tables, summarize_replay
from dualmap.simulation.workload.traces import Trace

SOME_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace_arguments(parser)
    add_loop_arguments(parser)
    sending = parser.add_argument_group("sending")
    sending.add_argument("--url", default="http://127.0.0.1:8000", help="endpoint, without /v1")
    sending.add_argument("--model", help="model name (none: the first that the endpoint lists)")
    sending.add_argument(
        "--send-as", choices=[endpoint.value for endpoint in Endpoint], default="chat", help="form of the requests"
    )
    sending.add_argument("--rate", type=float, metavar="R", help="mean requests per second (none: the trace's times)")
    sending.add_argument("--speedup", type=float, default=1.0, metavar="X", help="send so many times faster, on top")
    sending.add_argument(
        "--time-scale", type=float, metavar="K",
        help="engine seconds in a second, as the emulated instances were started (none: emulator.time_scale)",
    )  # fmt: skip
    sending.add_argument(
        "--slo-s", type=float,
        help="TTFT SLO in engine seconds of requests whose trace names none; sent along (none: scheduling.slo_ttft_s)",
    )  # fmt: skip
    sending.add_argument(
        "--slo-tpot-ms", type=float, default=TPOT_SLO_S * 1000, metavar="MS",
        help="SLO of the time per output token, in engine milliseconds: the report counts requests that meet both",
    )  # fmt: skip
    sending.add_argument("--timeout-s", type=float, default=3600.0, help="time for one answer in engine seconds")
    sending.add_argument("--salt", default="", help="another salt, other texts: caches of a former replay do not help")
    sending.add_argument("--api-key", help="sent as bearer token")
    report = parser.add_argument_group("report")
    report.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave the first N requests out of the figures"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    report.add_argument("--records", type=Path, metavar="FILE", help="write one JSON line per request here")
    report.add_argument("--quiet", action="store_true", help="no progress bar")


def run(
    arguments: argparse.Namespace,
    default_time_scale: float = 1.0,
    scheduling: SchedulingSettings = SchedulingSettings(),  # noqa: B008 - frozen
) -> int:
    """Replay and report. Exit code 0 when everything was answered, 1 when not, 2 for wrong options."""
    return exit_code("replay", lambda: _run(arguments, default_time_scale, scheduling))


def _run(arguments: argparse.Namespace, default_time_scale: float, scheduling: SchedulingSettings) -> int:
    options = _options(arguments, default_time_scale, scheduling)
    trace = _trace(arguments)
    record = uvloop.run(_replay(trace, options, arguments.quiet))
    report = summarize_replay(record)
    console = terminal()
    for table in report_tables(report):
        console.print(table)
    if arguments.json is not None:
        write_whole(arguments.json, report.to_json().decode())
    if arguments.records is not None:
        write_whole(arguments.records, record_lines(record.requests).decode())
    return 0 if report.failed == 0 and report.unsent == 0 else SOME_FAILED


def _options(arguments: argparse.Namespace, default_time_scale: float, scheduling: SchedulingSettings) -> ReplayOptions:
    time_scale = default_time_scale if arguments.time_scale is None else arguments.time_scale
    if arguments.slo_s is not None:
        scheduling = scheduling.model_copy(update={"slo_ttft_s": arguments.slo_s})
    positive = {
        "--time-scale": time_scale,
        "--slo-s": scheduling.slo_ttft_s,
        "--slo-tpot-ms": arguments.slo_tpot_ms,
        "--timeout-s": arguments.timeout_s,
        "--speedup": arguments.speedup,
        "--rate": 1.0 if arguments.rate is None else arguments.rate,
    }
    for option, value in positive.items():
        if not 0 < value < float("inf"):
            raise OptionError(f"{option} must be more than 0, found {value}")
    if arguments.skip < 0:
        raise OptionError(f"--skip must be at least 0, found {arguments.skip}")
    if not arguments.url.startswith(("http://", "https://")):
        raise OptionError(f"--url must start with http:// or https://, found {arguments.url!r}")
    return ReplayOptions(
        url=arguments.url.rstrip("/").removesuffix("/v1"),
        model=arguments.model,
        endpoint=Endpoint(arguments.send_as),
        scheduling=scheduling,
        slo_tpot_s=arguments.slo_tpot_ms / 1000,
        time_scale=time_scale,
        loop=loop_of(arguments),
        skip_requests=arguments.skip,
        skip_s=arguments.skip_s,
        timeout_s=arguments.timeout_s,
        salt=arguments.salt,
        api_key=arguments.api_key,
    )


def _trace(arguments: argparse.Namespace) -> Trace:
    trace = trace_source(arguments).load(arguments.rate)
    if arguments.concurrency is not None and (arguments.rate is not None or arguments.speedup != 1.0):
        raise OptionError("--concurrency has no rate: leave out --rate and --speedup")
    if arguments.skip >= len(trace.requests):
        raise OptionError(f"--skip {arguments.skip} leaves nothing of {len(trace.requests)} requests")
    return trace if arguments.speedup == 1.0 else trace.at_rate(trace.rate_per_s * arguments.speedup)


async def _replay(trace: Trace, options: ReplayOptions, quiet: bool) -> ReplayRecord:
    """Replay with a progress bar; the first Ctrl-C stops sending and reports what there is."""
    stop = asyncio.Event()
    with suppress(NotImplementedError):  # event loops of some systems know no signals
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet, transient=True) as bar:
        return await replay(trace, options, on_progress=_shown_on(bar, len(trace.requests)), stop=stop)


def _shown_on(bar: Progress, total: int) -> Callable[[ReplayProgress], None]:
    task = bar.add_task("replay", total=total)

    def show(progress: ReplayProgress) -> None:
        done = progress.answered + progress.failed
        on_time = f"{progress.on_time / done:.0%}" if done else "-"
        text = f"in flight {progress.in_flight}, failed {progress.failed}, on time {on_time}"
        bar.update(task, completed=done, description=text)

    return show
