"""Builds the native parts (``SOURCES``) where there is a C compiler; else a wheel is pure Python, which does the same.

DUALMAP_NATIVE=no leaves them out, and with DUALMAP_NATIVE=yes a build without them fails.
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

SOURCES = (
    Path("dualmap/api_bodies/plain_list.c"),
    Path("dualmap/router/http/plain_heads.c"),
    Path("dualmap/router/relay/relay.c"),
    Path("dualmap/scheduling/prompts/hashes.c"),
)


def extension_of(source: Path) -> Path:
    """The extension beside its source, for the stable ABI of Python 3.11: it serves every later Python, too."""
    return source.with_name(f"_{source.stem}.abi3.so")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        choice = os.environ.get("DUALMAP_NATIVE", "auto")
        if choice == "no":
            return
        editable = version == "editable"
        root = Path(self.root)
        folder = root if editable else self._make_folder()
        built = []
        for source in SOURCES:
            if not (root / source).is_file():
                raise FileNotFoundError(f"{source} is missing")
            target = folder / extension_of(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            problem = build(root / source, target)
            if problem is None:
                built.append(source)
            elif choice == "yes":
                raise RuntimeError(f"the native {source.stem} cannot be built: {problem}")
            else:
                self.app.display_warning(f"the native {source.stem} is not built, Python does the same: {problem}")
        if built and not editable:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            for source in built:
                name = extension_of(source)
                build_data["force_include"][str(folder / name)] = str(name)
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform}"

    def _make_folder(self) -> Path:
        """A folder that lasts as long as this hook: the wheel is written after ``initialize``."""
        self._folder = tempfile.TemporaryDirectory(prefix="dualmap-native-")
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
