"""``dualmap simulate``: a trace through a simulated fleet in virtual time."""

from __future__ import annotations

import argparse

from dualmap.cli.settings import Settings
from dualmap.simulation.commands import simulate
from dualmap.simulation.commands.options import ConfiguredFleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    simulate.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    configured = ConfiguredFleet(settings.scheduling, settings.emulator, settings.pools, settings.router.late_requests)
    return simulate.run(arguments, configured)
