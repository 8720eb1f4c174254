"""``dualmap evaluate``: every experiment of the paper, as one report."""

from __future__ import annotations

import argparse

from dualmap.cli.settings import Settings
from dualmap.research.commands import evaluate as command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return command.run(arguments, settings.scheduling, settings.emulator)
