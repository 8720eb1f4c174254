"""``dualmap calibrate URL``: measure an instance, and write what makes emulator and simulator behave like it;
``dualmap calibrate silicon:MODEL@CARD``: write an engine of measured kernels into a file."""

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
from dualmap.simulation.engine.silicon import PREFIX, SILICON_IN_WORDS, SiliconError, find_silicon, write_kept


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "url", metavar="URL",
        help=f"the instance itself, http://HOST:PORT, which should be idle; or {SILICON_IN_WORDS}",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE",
        help=f"a file for --config, as YAML; of an engine of measured kernels one for --preset {PREFIX}FILE.json",
    )  # fmt: skip
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


def is_silicon(name: str) -> bool:
    """Whether an engine of measured kernels is to be written, and no instance to be measured."""
    return name.startswith(PREFIX)


def write_silicon(arguments: argparse.Namespace) -> int:
    return exit_code("calibrate", lambda: _write_silicon(arguments.url, arguments.out))


def _write_silicon(name: str, out: Path) -> int:
    if out.suffix != ".json":
        raise OptionError(f"--out {out}: an engine of measured kernels is kept in a file that ends with .json")
    try:
        kept, changes = find_silicon(name)
        if changes:
            raise OptionError(f"{name}: changes ({changes}) belong behind {PREFIX}{out}, not into it")
        write_kept(kept, out)
    except SiliconError as error:
        raise OptionError(str(error)) from error
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{kept.note}.\ndualmap simulate --preset {PREFIX}{out}", markup=False)
    return 0


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
