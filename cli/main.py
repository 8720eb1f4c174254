"""The ``dualmap`` command: finds the subcommand, imports only what that needs, runs it.

Exit codes: 0 done, 1 it ran and failed, 2 the command line or the configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from cli.errors import CommandError

if TYPE_CHECKING:
    from cli.settings import Settings

USAGE_ERROR = 2
INTERRUPTED = 130
_CONFIG_HELP = "YAML file with settings"


class CommandModule(Protocol):
    """What a subcommand's module provides; ``SHORTHANDS`` (option to setting name) may be left out."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace, settings: Settings) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    module: str


COMMANDS = {
    "up": Command("start a whole fleet on this machine", "cli.up"),
    "router": Command("run one router replica", "cli.serve_router"),
    "worker": Command("run one background worker", "cli.serve_worker"),
    "emulate": Command("run emulated vLLM instances", "cli.serve_emulator"),
    "instances": Command("add, drain, resume, remove or list instances", "cli.instances"),
    "inspect": Command("look into the shared state", "cli.inspect"),
    "top": Command("watch a fleet as a full-screen table", "cli.top"),
    "explain": Command("explain why a request went where it went", "cli.explain"),
    "replay": Command("send a trace through a live endpoint", "cli.replay"),
    "record": Command("make one trace of what replicas recorded", "cli.record"),
    "calibrate": Command("measure an instance, for emulator and simulator to behave like it", "cli.calibrate"),
    "simulate": Command("run a trace through a simulated fleet in virtual time", "cli.simulate"),
    "evaluate": Command("run the paper's whole evaluation and write a report", "cli.evaluate"),
    "laboratory": Command("compare policies and settings over traces, fleets, rates and seeds", "cli.laboratory"),
    "settings": Command("print the settings in effect, or their reference", "cli.reference"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else USAGE_ERROR
    if words[0] == "--version":
        print(f"dualmap {_version()}")
        return 0
    if words[0] not in COMMANDS:
        print(f"dualmap: there is no command {words[0]!r}; 'dualmap --help' lists them", file=sys.stderr)
        return USAGE_ERROR
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `dualmap inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, words: list[str]) -> int:
    module, parser = command_parser(name)
    # Taken out first, so that it may also come after a subcommand's own words.
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    if "-h" in words or "--help" in words:
        parser.parse_args(words)

    from cli.configuration import ConfigurationError, load_settings, nearly_settings, split_flags
    from cli.own_policies import load_own_policies

    try:
        load_own_policies()
        flags, rest = split_flags(words, getattr(module, "SHORTHANDS", {}))
        given, rest = common.parse_known_args(rest)
        parsed = parser.parse_args(rest)
        settings = load_settings(flags, os.environ, given.config)
    except ConfigurationError as error:
        for line in str(error).splitlines():
            print(f"dualmap {name}: {line}", file=sys.stderr)
        return USAGE_ERROR
    for warning in nearly_settings(os.environ):
        print(f"dualmap {name}: warning: {warning}", file=sys.stderr)
    try:
        return module.run(parsed, settings)
    except CommandError as error:
        print(f"dualmap {name}: {error}", file=sys.stderr)
        return error.exit_code


def command_parser(name: str) -> tuple[CommandModule, argparse.ArgumentParser]:
    """A command's module, and the parser of its words."""
    module = cast("CommandModule", importlib.import_module(COMMANDS[name].module))
    parser = argparse.ArgumentParser(
        prog=f"dualmap {name}",
        description=COMMANDS[name].summary,
        epilog="Every setting is a flag too (--router.port 8000); 'dualmap settings --list' names them all.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    module.add_arguments(parser)
    return module, parser


def overview() -> str:
    """What ``dualmap --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: dualmap COMMAND [OPTIONS]", "", *lines, "", "'dualmap COMMAND --help' says more."])


def _version() -> str:
    from importlib.metadata import version

    return version("dualmap-fleet")


if __name__ == "__main__":
    sys.exit(main())
