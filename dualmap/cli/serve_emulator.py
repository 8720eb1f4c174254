"""``dualmap emulate``: emulated vLLM servers, each on a port of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dualmap.cli.errors import CommandError
from dualmap.cli.logs import log_to_stderr
from dualmap.cli.parent import end_with_parent
from dualmap.cli.settings import Settings
from dualmap.runtime.collector import uncollected

SHORTHANDS = {
    "--instances": "emulator.instances",
    "--port": "emulator.port",
    "--preset": "emulator.preset",
    "--time-scale": "emulator.time_scale",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, setting in SHORTHANDS.items():
        parser.add_argument(option, default=argparse.SUPPRESS, help=f"short for --{setting}")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with uncollected():
        import uvloop

        from dualmap.simulation.emulator.serve import serve
        from dualmap.simulation.engine.presets import find_preset

    log_to_stderr(settings.router.log_level, style=settings.router.log_format, levels=settings.router.log_levels)
    end_with_parent(os.environ)
    if note := find_preset(settings.emulator.preset).note:
        print(f"{settings.emulator.preset}: {note}.", file=sys.stderr)
    try:
        uvloop.run(serve(settings.emulator, on_ready=_announce))
    except OSError as error:
        raise CommandError(f"{error}; choose another port with --emulator.port") from error
    return 0


def _announce(urls: Sequence[str]) -> None:
    for url in urls:
        print(f"an emulated instance serves {url}", flush=True)
