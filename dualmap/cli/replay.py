"""``dualmap replay``: a trace through a live endpoint."""

from __future__ import annotations

import argparse

from dualmap.cli.settings import Settings
from dualmap.simulation.commands import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    replay.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return replay.run(arguments, settings.emulator.time_scale, settings.scheduling)
