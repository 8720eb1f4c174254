"""``dualmap laboratory``: policies and settings compared over traces, fleets, rates and seeds."""

from __future__ import annotations

import argparse

from dualmap.cli.settings import Settings
from dualmap.research.commands import laboratory as command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return command.run(arguments, settings.scheduling, settings.emulator)
