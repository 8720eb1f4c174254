"""``dualmap completion``: the commands, options and choices, for a shell to complete."""

from __future__ import annotations

import argparse
from typing import Any

import shtab

from dualmap.cli.main import COMMANDS, command_parser
from dualmap.cli.parser import CommandParser
from dualmap.cli.settings import Settings

SHELLS = tuple(shtab.SUPPORTED_SHELLS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def run(arguments: argparse.Namespace, _: Settings) -> int:
    print(script(arguments.shell))
    return 0


def script(shell: str) -> str:
    """The completion script of ``shell``, one of ``SHELLS``."""
    parser = CommandParser(prog="dualmap")
    commands: Any = parser.add_subparsers()
    for name, command in COMMANDS.items():
        if not command.is_here:
            continue
        _, one = command_parser(name)
        # A parser is added by name only as a copy of its parts: argparse makes subparsers itself.
        commands.add_parser(name, help=command.summary, parents=[one], add_help=False, conflict_handler="resolve")
    return str(shtab.complete(parser, shell=shell))
