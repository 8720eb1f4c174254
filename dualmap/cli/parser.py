"""The parser of a command's words: its help shows examples, and a wrong word is answered with the right one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from dualmap.runtime.spelling import did_you_mean

_CHOICE = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.+)\)$")
_UNKNOWN = "unrecognized arguments: "
_INVALID = re.compile(r"invalid (\w+) value: (.+)$", re.DOTALL)
_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "whole_amount": "a whole number such as 600, 100k or 2M",
    "fromisoformat": "a date such as 2026-01-31",
}
"""The kind of value that an option takes, by the name of the function that reads it."""


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Names a default only where there is one; lines of examples stay as they are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", [], ()):
            return action.help
        return super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Options are never abbreviated: an abbreviation breaks when a new option begins like it."""

    def __init__(self, *arguments: Any, options: Sequence[str] = (), **keywords: Any) -> None:
        """``options`` are words that another parser takes out first: they are suggested as well."""
        keywords.setdefault("formatter_class", _Help)
        keywords.setdefault("allow_abbrev", False)
        super().__init__(*arguments, **keywords)
        self._other_options = tuple(options)

    def error(self, message: str) -> NoReturn:
        said = _INVALID.sub(lambda found: f"takes {_IN_WORDS.get(found[1], 'another value')}: not {found[2]}", message)
        super().error(f"{said}{self._suggestion(message)}")

    def _suggestion(self, message: str) -> str:
        if message.startswith(_UNKNOWN):
            words = message.removeprefix(_UNKNOWN).split()
            options = [word.partition("=")[0] for word in words if word.startswith("-")]
            return did_you_mean(options[0], (*self._options(), *self._other_options)) if options else ""
        if found := _CHOICE.search(message):
            return did_you_mean(found[1], (choice.strip("' ") for choice in found[2].split(",")))
        return ""

    def _options(self) -> Iterator[str]:
        """All options, those of its subcommands too: argparse reports their unknown words here."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from inner._option_string_actions
