"""``dualmap record``: recorded traffic as a trace."""

from __future__ import annotations

import argparse

from dualmap.cli.settings import Settings
from dualmap.simulation.commands import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    record.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return record.run(arguments, settings.scheduling, settings.emulator)
