"""``dualmap calibrate URL``: measure an instance, and write what makes emulator and simulator behave like it."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from dualmap.runtime.amounts import whole_amount
from dualmap.runtime.trust import InstanceTrust
from dualmap.simulation.calibrate.fit import Fitted, fit_costs
from dualmap.simulation.calibrate.measure import CalibrationError, Engine, plan_for
from dualmap.simulation.calibrate.preset import Limits, preset_yaml
from dualmap.simulation.commands.options import OptionError, exit_code, write_whole
from dualmap.simulation.commands.progress import progress_bars


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the instance itself, http://HOST:PORT; it should be idle")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a file for --config, as YAML")
    parser.add_argument("--model", help="model name to ask for (default: the first that the instance serves)")
    parser.add_argument(
        "--repetitions",
        type=int,
        default=5,
        help="rounds over all prompt lengths; batches are measured in every second one",
    )
    parser.add_argument(
        "--batched-tokens", type=whole_amount, default=None, metavar="TOKENS",
        help="the server's --max-num-batched-tokens, if it does not report it",
    )  # fmt: skip
    parser.add_argument(
        "--seqs", type=int, default=None, metavar="N", help="the server's --max-num-seqs, if it does not report it"
    )


def run(arguments: argparse.Namespace, limits: Limits, api_key: str | None, trust: InstanceTrust) -> int:
    return exit_code("calibrate", lambda: _run(arguments, limits, api_key, trust))


def _run(arguments: argparse.Namespace, limits: Limits, api_key: str | None, trust: InstanceTrust) -> int:
    if arguments.repetitions < 1:
        raise OptionError("--repetitions must be at least 1")
    console = Console(highlight=False, soft_wrap=True)
    try:
        fitted = asyncio.run(_measured(arguments, limits, api_key, trust, console))
        text = preset_yaml(limits, fitted, arguments.url)
    except (CalibrationError, ValueError) as error:
        raise OptionError(f"{arguments.url}: {error}") from error
    write_whole(arguments.out, text)
    console.print(
        f"off by {fitted.prefill_error:.0%} of times to first token and {fitted.decode_error:.0%} of decode steps on"
        f" average; dualmap emulate --config {arguments.out}"
    )
    return 0


async def _measured(
    arguments: argparse.Namespace, limits: Limits, api_key: str | None, trust: InstanceTrust, console: Console
) -> Fitted:
    plan = plan_for(
        limits.max_model_len, limits.max_num_seqs, limits.kv_capacity_tokens, repetitions=arguments.repetitions
    )
    engine = Engine(arguments.url, limits.model, api_key=api_key, trust=trust)
    try:
        with progress_bars() as progress:
            task = progress.add_task("measurements", total=len(plan.prompt_lengths) + len(plan.batches))

            def say(line: str) -> None:
                progress.advance(task)
                console.print(line)

            prefills, decodes = await engine.measure(plan, say)
    finally:
        engine.close()
    return fit_costs(prefills, decodes, limits.max_num_batched_tokens)
