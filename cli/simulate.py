"""``dualmap simulate``: a trace through a simulated fleet in virtual time."""

from __future__ import annotations

import argparse

from cli.settings import Settings
from simulation.commands import simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulate.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return simulate.run(arguments, settings.scheduling, settings.emulator)
