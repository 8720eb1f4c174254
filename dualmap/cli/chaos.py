"""``dualmap chaos``: faults on a local fleet under traffic whose every answer is known."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from pydantic import BaseModel

from dualmap.cli.fleet_plan import plain
from dualmap.cli.parent import PARENT_PIPE_VARIABLE
from dualmap.cli.settings import Settings
from dualmap.research.commands import chaos as command

S = TypeVar("S", bound=BaseModel)

_ROUTER = {"replica_lease_s": 2.0, "settle_s": 0.0, "drain_timeout_s": 3.0}
_WORKER = {"lease_s": 1.5, "health_interval_s": 0.5, "stall_down_s": 5.0}
_EMULATOR = {"stream_interval": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_arguments(parser)


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    settings = with_short_times(settings)
    return command.run(arguments, plain(settings), settings.emulator, PARENT_PIPE_VARIABLE)


def with_short_times(settings: Settings) -> Settings:
    """The settings with short leases, unless they are set, so that what follows a fault is seen soon; and with an
    emulator that a prompt can kill."""
    changed = {
        "router": _unless_set(settings.router, _ROUTER),
        "worker": _unless_set(settings.worker, _WORKER),
        "emulator": _unless_set(settings.emulator, _EMULATOR),
    }
    return settings.model_copy(update=changed)


def _unless_set(section: S, values: dict[str, Any]) -> S:
    unset = {name: value for name, value in values.items() if name not in section.model_fields_set}
    return section.model_copy(update=unset)
