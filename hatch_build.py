"""Builds the native relay (dualmap/router/relay/relay.c) where there is a C compiler; else a wheel is pure Python.

DUALMAP_NATIVE=no leaves the relay out, and with DUALMAP_NATIVE=yes a build without it fails.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("dualmap/router/relay/relay.c")
NAME = "_relay.abi3.so"
"""The extension is built for the stable ABI of Python 3.11, so it serves every later Python, too."""


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        choice = os.environ.get("DUALMAP_NATIVE", "auto")
        if choice == "no":
            return
        source = Path(self.root) / SOURCE
        if not source.is_file():
            raise FileNotFoundError(f"{SOURCE} is missing")
        editable = version == "editable"
        folder = source.parent if editable else self._make_folder()
        problem = build(source, folder / NAME)
        if problem is not None:
            if choice == "yes":
                raise RuntimeError(f"the native relay cannot be built: {problem}")
            self.app.display_warning(f"the native relay is not built, streams pass without it: {problem}")
            return
        if not editable:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["force_include"][str(folder / NAME)] = f"dualmap/router/relay/{NAME}"
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"

    def _make_folder(self) -> Path:
        """A folder that lasts as long as this hook: the wheel is written after ``initialize``."""
        self._folder = tempfile.TemporaryDirectory(prefix="dualmap-relay-")
        return Path(self._folder.name)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def build(source: Path, target: Path) -> str | None:
    """Compile the extension; returns why it could not be."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        compiler = ["cc"]
        if shutil.which("cc") is None:
            return "there is no C compiler"
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        return f"there is no {include / 'Python.h'} (python3-dev)"
    made = target.with_name(f"{target.name}.{os.getpid()}")
    flags = ["-O2", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-g0"]
    flags += shlex.split(os.environ.get("CFLAGS", ""))
    command = [*compiler, *flags, f"-I{include}", str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"{shlex.join(command)}: {done.stderr.strip()[-500:]}"
    made.replace(target)  # one that is loaded stays as it is
    return None
