"""Extensions compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and programs that run with them.

The program is a module of the tests, run by an interpreter into which the sanitizers are loaded. All its memory comes
from ``malloc``, each object in a place of its own, so that a byte read or written beyond one ends the program.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def sanitized(source: Path, folder: Path) -> Path:
    """The extension of a source, compiled with sanitizers into a folder; skips where there is no such compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if not sys.platform.startswith("linux") or shutil.which(compiler[0]) is None:
        pytest.skip("sanitizers need Linux and a C compiler; set CC")
    made = folder / f"_{source.stem}.abi3.so"
    flags = ["-g", "-O1", "-std=gnu11", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *SANITIZERS]
    command = [*compiler, *flags, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "sanitize" in done.stderr:
        pytest.skip(f"the C compiler has no sanitizers: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    return made


def run_sanitized(program: str, *arguments: str) -> str:
    """What a module of the tests prints that runs with sanitizers."""
    found = subprocess.run(
        [*shlex.split(os.environ.get("CC", "cc")), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the C compiler has no libasan.so")
    environment = {
        **os.environ,
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter keeps what it has at its end
        "PYTHONMALLOC": "malloc",
    }
    command = [sys.executable, "-m", program, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def loaded(made: Path) -> Any:
    """The extension at a path."""
    loader = ExtensionFileLoader(made.name.partition(".")[0], str(made))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    extension = module_from_spec(spec)
    loader.exec_module(extension)
    return extension
