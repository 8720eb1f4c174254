"""The command line's own manners."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.cli.configuration import split_flags
from dualmap.cli.fleet_folder import CONFIG, fleet_folder
from dualmap.cli.main import COMMANDS, command_parser, main
from dualmap.cli.parser import CommandParser


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_no_command_and_an_unknown_command_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["fly"]) == 2
    assert "'fly'" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert COMMANDS[name].summary in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_provides_what_the_front_door_calls(name: str) -> None:
    module = importlib.import_module(COMMANDS[name].module)
    assert callable(module.add_arguments)
    assert callable(module.run)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_of_a_command_is_the_flag_of_a_setting(name: str) -> None:
    """Flags of settings are taken first, so that such an option would never get its value."""
    module, parser = command_parser(name)
    assert isinstance(parser, CommandParser)
    own = set(parser._options()) - set(getattr(module, "SHORTHANDS", {}))

    assert own
    assert [option for option in own if split_flags([option, "1"], {})[0]] == []


def test_help_loads_neither_settings_nor_servers() -> None:
    script = (
        "import sys; from dualmap.cli.main import main; main(['--help']);"
        "print([m for m in ('pydantic', 'fastapi', 'redis', 'rich', 'httpx') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "setting"),
    [("router", "--router.port"), ("router", "--router.ops_port"), ("worker", "--worker.ops_port")],
)
def test_a_port_in_use_is_named_with_the_setting_that_chooses_another(command: str, setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "dualmap",
                command,
                "--store.url",
                "memory://",
                "--router.port",
                "0",
                setting,
                port,
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert ended.returncode == 1
    said = ended.stderr.splitlines()[-1]
    assert port in said
    assert f"{setting} PORT" in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    "command",
    [("router", "--router.port", "0"), ("worker",), ("inspect", "overview"), ("inspect", "hot"), ("up", "--port", "0")],
)
def test_what_the_server_refuses_of_the_store_url_is_a_wrong_setting(
    valkey_url: str, command: tuple[str, ...], tmp_path: Path
) -> None:
    url = valkey_url.replace("redis://", "redis://nobody:wrong@")

    ended = subprocess.run(
        [sys.executable, "-m", "dualmap", *command, "--store.url", url],
        env={"TMPDIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 2
    assert "refuses the user or password of store.url" in ended.stderr.splitlines()[-1]


@pytest.fixture
def two_fleets(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """Settings files of two fleets that run as far as commands can see; the older one first."""
    # tmp_path may be too long for a socket's path: then both would stand in /tmp, beside the fleets of other tests.
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        with fleet_folder() as older, fleet_folder() as younger, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            for age_s, folder in ((20, older), (10, younger)):
                config = folder / CONFIG
                config.write_text(json.dumps({"router": {"port": closed.getsockname()[1]}}))
                os.utime(config, (time.time() - age_s,) * 2)
            yield older / CONFIG, younger / CONFIG


@pytest.mark.parametrize("words", [["explain"], ["tenants", "list"], ["instances", "list"], ["settings", "fleet"]])
def test_a_command_that_looks_says_which_of_several_fleets_it_means(
    words: list[str], two_fleets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    main(words)

    error = capsys.readouterr().err
    assert "2 fleets run on this machine, and this is the youngest" in error
    assert f"--config {two_fleets[0]}" in error


@pytest.mark.parametrize(
    "words",
    [
        ["tenants", "create", "acme"],
        ["instances", "drain", "instance-1"],
        ["settings", "set", "policy=dualmap"],
        ["settings", "reset", "policy"],
    ],
)
def test_a_command_that_changes_something_takes_none_of_several_fleets_by_itself(
    words: list[str], two_fleets: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "nothing was changed, as 2 fleets run on this machine" in error
    assert all(f"--config {each}   (port " in error for each in two_fleets)

    assert main([*words, "--config", str(two_fleets[1])]) == 1  # it is called, and does not answer
    assert "no router answers" in capsys.readouterr().err


def test_a_file_of_the_current_folder_is_not_taken_for_a_package(tmp_path: Path) -> None:
    for name in ("click", "pydantic", "yaml", "redis", "rich", "argparse", "difflib"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the wrong {name}')")

    done = subprocess.run(
        [sys.executable, "-m", "dualmap", "settings", "--json"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")
