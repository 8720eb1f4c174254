"""Completion scripts, one of them in a real shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from dualmap.cli.completion import SHELLS, script


@pytest.mark.parametrize("shell", SHELLS)
def test_there_is_a_script_for_every_shell(shell: str) -> None:
    assert "dualmap" in script(shell)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["sim"], "simulate"),
        (["up", "--repl"], "--replicas"),
        (["inspect", "ov"], "overview"),
        (["top", "--sort", "ah"], "ahead"),
    ],
)
def test_bash_completes_commands_options_and_choices(words: list[str], completed: str) -> None:
    asked = f"COMP_WORDS=(dualmap {' '.join(words)}); COMP_CWORD={len(words)}"
    lines = f"{script('bash')}\n{asked}\n_shtab_dualmap\necho ${{COMPREPLY[@]}}\n"

    done = subprocess.run(["bash"], input=lines, capture_output=True, text=True, check=True, timeout=60)

    assert completed in done.stdout.split()
