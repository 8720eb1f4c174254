"""``dualmap evaluate``: every experiment of the paper, as one report."""

from __future__ import annotations

import argparse

from cli.settings import Settings
from simulation.commands import evaluate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    return evaluate.run(arguments, settings.scheduling, settings.emulator)
