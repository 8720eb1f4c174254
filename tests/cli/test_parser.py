"""The parser of a command's words."""

from __future__ import annotations

import shlex

import pytest

from dualmap.cli.configuration import split_flags
from dualmap.cli.main import COMMANDS, command_parser, main
from dualmap.cli.parser import CommandParser


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_a_commands_help_is_understood(name: str) -> None:
    module, parser = command_parser(name)
    assert COMMANDS[name].examples
    for example in COMMANDS[name].examples:
        words = shlex.split(example.partition(" > ")[0].replace("--config fleet.yaml", ""))  # any command's
        _, rest = split_flags(words, getattr(module, "SHORTHANDS", {}))
        parser.parse_args(rest)
        assert f"dualmap {name} {example}".rstrip() in parser.format_help()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_a_default_only_where_there_is_one(name: str) -> None:
    _, parser = command_parser(name)
    for nothing in ("None", "False", "[]", ""):
        assert f"(default: {nothing})" not in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["simualte"], "simulate"),
        (["up", "--replcias", "3"], "--replicas"),
        (["up", "--polcy", "dualmap"], "--policy"),
        (["inspect", "overveiw"], "overview"),
        (["instances", "drian", "a"], "drain"),
        (["instances", "role", "a", "prefil"], "prefill"),
        (["inspect", "kv", "a", "--limt", "3"], "--limit"),
        (["settings", "--scheduling.polcy", "dualmap"], "scheduling.policy"),
    ],
)
def test_a_misspelt_word_is_answered_with_the_one_that_is_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(str(ended.code))

    assert code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_a_word_that_is_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CommandParser(prog="dualmap x").parse_args(["--zzzzzz"])
    assert "did you mean" not in capsys.readouterr().err
