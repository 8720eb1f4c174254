"""``dualmap laboratory``: policies and settings compared over traces, fleets, rates and seeds."""

from __future__ import annotations

import argparse

from cli.settings import Settings
from simulation.commands import laboratory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    laboratory.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return laboratory.run(arguments, settings.scheduling, settings.emulator)
