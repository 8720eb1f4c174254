"""The ``dualmap`` command: finds the subcommand, imports only what that needs, runs it.

Exit codes: 0 done, 1 it ran and failed, 2 the command line or the configuration is wrong, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from dualmap.cli.errors import CommandError
from dualmap.cli.parser import CommandParser
from dualmap.runtime.collector import uncollected
from dualmap.runtime.spelling import did_you_mean

if TYPE_CHECKING:
    from dualmap.cli.settings import Settings

USAGE_ERROR = 2
INTERRUPTED = 130
_CONFIG_HELP = "YAML file with settings"


class CommandModule(Protocol):
    """The interface of a subcommand's module; three more members may be left out.

    ``SHORTHANDS`` maps an option to a setting's name. ``looks_at_a_fleet(parsed)`` says whether the command calls a
    running fleet: unless the user names one, that is the one which runs on this machine. ``changes_a_fleet(parsed)``
    says whether it changes one: then the user must choose where several run.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace, settings: Settings) -> int: ...


@dataclass(frozen=True, slots=True)
class Command:
    summary: str
    module: str
    examples: tuple[str, ...]
    """Command lines without ``dualmap NAME``."""
    of_a_checkout: bool = False
    """The command runs experiments, which are not installed with the package."""

    @property
    def is_here(self) -> bool:
        return not self.of_a_checkout or importlib.util.find_spec("dualmap.research") is not None


COMMANDS = {
    "up": Command(
        "start a whole fleet on this machine",
        "dualmap.cli.up",
        ("", "--replicas 1 --instances 8 --policy round-robin", "--instance-url http://127.0.0.1:8001 --model NAME"),
    ),
    "router": Command("run one router replica", "dualmap.cli.serve_router", ("--config fleet.yaml",)),
    "picker": Command(
        "run one endpoint picker for Envoy",
        "dualmap.cli.serve_picker",
        ("--config fleet.yaml", "--picker.port 9002 --picker.host 0.0.0.0"),
    ),
    "worker": Command("run one background worker", "dualmap.cli.serve_worker", ("--config fleet.yaml",)),
    "emulate": Command("run emulated vLLM instances", "dualmap.cli.serve_emulator", ("--instances 2 --port 8100",)),
    "instances": Command(
        "add, label, drain, resume, remove or list instances",
        "dualmap.cli.instances",
        ("list", "add npu-2 http://10.0.0.12:8000 --config fleet.yaml", "drain npu-0", "remove npu-0 --timeout-s 600"),
    ),
    "revisions": Command(
        "choose how many sessions each revision of the instances gets",
        "dualmap.cli.revisions",
        ("", "set v2=5%", "set v2=0 --move", "tenant acme v2", "audit"),
    ),
    "rollout": Command(
        "give a new revision more and more sessions, while figures say that it is as good as the one before",
        "dualmap.cli.rollout",
        ("start v2", "start v2 --steps 1,5,25,100 --bound ttft=1.1", "status", "pause", "rollback"),
    ),
    "tenants": Command(
        "make, change or list teams that share a fleet, their keys and limits",
        "dualmap.cli.tenants",
        (
            "list",
            "create acme requests_per_minute=600 models=qwen-7b --key ci",
            "set acme requests_per_minute=none tokens_per_day=50_000_000",
            "rotate acme ci --keep-old-s 3600",
            "revoke acme ci",
            "audit acme",
        ),
    ),
    "inspect": Command(
        "look into the shared state",
        "dualmap.cli.inspect",
        ("overview", "queues --store.url redis://127.0.0.1:6379/0", "requests --json", "kv instance-1 --limit 10"),
    ),
    "top": Command("watch a fleet as a full-screen table", "dualmap.cli.top", ("", "--sort ahead", "--json")),
    "explain": Command(
        "explain why a request went where it went", "dualmap.cli.explain", ("", "chatcmpl-4f1c", "4f1c --json")
    ),
    "adapters": Command(
        "load and unload LoRA adapters, and see where they are",
        "dualmap.cli.adapters",
        ("", "load sql-writer /adapters/sql-writer --rank 16", "unload sql-writer", "--pool small --json"),
    ),
    "batches": Command(
        "batches of requests that no client waits for, and how far they are",
        "dualmap.cli.batches",
        ("", "--tenant acme --json"),
    ),
    "runs": Command(
        "agents' runs on the memory of the fleet, and those that wait for it",
        "dualmap.cli.runs",
        ("", "--state parked", "--tenant acme --json"),
    ),
    "usage": Command(
        "what tenants used, by day, tenant, key, class and model",
        "dualmap.cli.usage",
        ("", "--days 31 --by tenant,model --format csv", "--records --follow"),
    ),
    "replay": Command(
        "send a trace through a live endpoint", "dualmap.cli.replay", ("--trace toolagent --requests 500 --rate 8",)
    ),
    "record": Command(
        "make one trace of what replicas recorded",
        "dualmap.cli.record",
        ("/var/lib/dualmap/records --out trace.jsonl",),
    ),
    "calibrate": Command(
        "measure an instance, for emulator and simulator to behave like it",
        "dualmap.cli.calibrate",
        ("http://127.0.0.1:8001 --out engine.json",),
    ),
    "simulate": Command(
        "run a trace through a simulated fleet in virtual time",
        "dualmap.cli.simulate",
        ("--trace toolagent --rate 8 --policy dualmap,round-robin", "goodput --trace conversation --on-time 0.95"),
    ),
    "what-if": Command(
        "a recorded hour on a twin of the fleet, as it is and as it would be",
        "dualmap.cli.what_if",
        (
            "--recording /var/lib/dualmap/records --change change.yaml --url http://127.0.0.1:8000",
            "--recording hour.jsonl --change change.yaml --config fleet.yaml --preset engine.json --slo-tpot-ms 100",
        ),
    ),
    "evaluate": Command(
        "run the paper's whole evaluation and write a report", "dualmap.cli.evaluate", ("",), of_a_checkout=True
    ),
    "laboratory": Command(
        "compare policies and settings over traces, fleets, rates and seeds",
        "dualmap.cli.laboratory",
        ("",),
        of_a_checkout=True,
    ),
    "chaos": Command(
        "break a local fleet at every joint, and check every answer",
        "dualmap.cli.chaos",
        ("", "--scenario engine-dead,router-killed --keep chaos-logs"),
        of_a_checkout=True,
    ),
    "settings": Command(
        "print the settings in effect, or all that there are",
        "dualmap.cli.show_settings",
        ("--config fleet.yaml", "--list", "set policy=dualmap", "history"),
    ),
    "completion": Command(
        "print the completion script of a shell", "dualmap.cli.completion", ("bash > /etc/bash_completion.d/dualmap",)
    ),
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
        meant = did_you_mean(words[0], COMMANDS) or "; 'dualmap --help' lists them"
        print(f"dualmap: there is no command {words[0]!r}{meant}", file=sys.stderr)
        return USAGE_ERROR
    if not COMMANDS[words[0]].is_here:
        print(
            f"dualmap {words[0]}: experiments are not installed with the package; run it from a checkout",
            file=sys.stderr,
        )
        return 1
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `dualmap inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(name: str, words: list[str]) -> int:
    module, parser = command_parser(name)
    # The common options are taken out first, so that they may also come after a subcommand's own words.
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    if "-h" in words or "--help" in words:
        parser.parse_args(words)

    with uncollected():
        from dualmap.cli.configuration import (
            ConfigurationError,
            load_settings,
            names_a_fleet,
            nearly_settings,
            split_flags,
        )
        from dualmap.cli.fleet_folder import fleet_of_this_machine
        from dualmap.cli.own_policies import load_own_policies

    try:
        load_own_policies()
        flags, rest = split_flags(words, getattr(module, "SHORTHANDS", {}))
        given, rest = common.parse_known_args(rest)
        parsed = parser.parse_args(rest)
        config, note = given.config, ""
        parsed.choice = ""
        if getattr(module, "looks_at_a_fleet", _never)(parsed) and not names_a_fleet(flags, os.environ, config):
            here = fleet_of_this_machine()
            config, note, parsed.choice = here.config, here.if_failed, here.choice
            if here.choice and getattr(module, "changes_a_fleet", _never)(parsed):
                raise ConfigurationError(f"nothing was changed, as {here.all}")
        settings = load_settings(flags, os.environ, config)
    except ConfigurationError as error:
        for line in str(error).splitlines():
            print(f"dualmap {name}: {line}", file=sys.stderr)
        return USAGE_ERROR
    for warning in nearly_settings(os.environ):
        print(f"dualmap {name}: warning: {warning}", file=sys.stderr)
    if parsed.choice:
        print(f"dualmap {name}: {parsed.choice}", file=sys.stderr)
    try:
        return module.run(parsed, settings)
    except CommandError as error:
        print(f"dualmap {name}: {error}", file=sys.stderr)
        if note and error.exit_code != USAGE_ERROR:
            print(f"dualmap {name}: {note}", file=sys.stderr)
        return error.exit_code


def _never(_: argparse.Namespace) -> bool:
    return False


def command_parser(name: str) -> tuple[CommandModule, argparse.ArgumentParser]:
    """A command's module, and the parser of its words."""
    with uncollected():
        module = cast("CommandModule", importlib.import_module(COMMANDS[name].module))
    command = COMMANDS[name]
    lines = [f"  dualmap {name} {words}".rstrip() for words in command.examples]
    every = "Every setting is a flag too (--router.port 8000); 'dualmap settings --list' names them all."
    parser = CommandParser(
        prog=f"dualmap {name}",
        description=command.summary,
        epilog="\n".join(["examples:", *lines, "", every]),
        options=tuple(getattr(module, "SHORTHANDS", {})),
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    module.add_arguments(parser)
    return module, parser


def overview() -> str:
    """The text that ``dualmap --help`` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items() if command.is_here]
    return "\n".join(["usage: dualmap COMMAND [OPTIONS]", "", *lines, "", "'dualmap COMMAND --help' says more."])


def _version() -> str:
    from dualmap.runtime.extras import package_version

    return package_version()


if __name__ == "__main__":
    sys.exit(main())
