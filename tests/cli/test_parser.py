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
        (["up", "--policy", "dualmp"], "dualmap"),
        (["simulate", "--policy", "dualmp"], "dualmap"),
        (["simulate", "--trace", "toolagnt"], "toolagent"),
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--replicas", "x"], "takes a whole number of at least 1: not 'x'"),
        (["up", "--replicas", "0"], "takes a whole number of at least 1: not '0'"),
        (["up", "--ready-within-s", "soon"], "takes a number of seconds above 0: not 'soon'"),
        (["explain", "--limit", "x"], "takes a whole number: not 'x'"),
        (["top", "--interval-s", "x"], "takes a number: not 'x'"),
        (["usage", "--last", "x"], "takes a date such as 2026-01-31: not 'x'"),
        (["instances", "add", "a", "http://a", "--kv-capacity-tokens", "x"], "takes a whole number such as 600, 100k"),
    ],
)
def test_a_value_of_a_wrong_kind_is_answered_with_what_the_option_takes(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_sum_of_usage_by_what_there_is_not_is_a_wrong_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--by", "tenat", "--url", "http://127.0.0.1:1"]) == 2
    assert "did you mean tenant?" in capsys.readouterr().err
    assert main(["usage", "--days", "0", "--url", "http://127.0.0.1:1"]) == 2
