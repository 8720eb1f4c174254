"""The installed wheel has one package, with its parts in it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from dualmap.router.relay.relay import NATIVE

ROOT = Path(__file__).resolve().parents[1]
NATIVE_SOURCES = {
    "dualmap/api_bodies/plain_list.c",
    "dualmap/router/http/plain_heads.c",
    "dualmap/router/relay/relay.c",
    "dualmap/scheduling/prompts/hashes.c",
}
PACKAGES = {path.parent.name for path in (ROOT / "dualmap").glob("*/__init__.py")} - {"research"}


def built(target: str, folder: Path, **environment: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    environment = {**os.environ, **environment}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(built("wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_installs_one_package_with_every_file_of_its_parts(installed: Path) -> None:
    packages = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    listed = subprocess.run(
        ["git", "ls-files", *sorted(PACKAGES)], cwd=ROOT / "dualmap", capture_output=True, text=True, check=True
    ).stdout

    assert packages == {"dualmap"}
    assert {path.name for path in (installed / "dualmap").iterdir() if path.is_dir()} == PACKAGES
    assert [name for name in listed.split() if not (installed / "dualmap" / name).is_file()] == []
    assert (installed / "dualmap" / "py.typed").is_file()


def test_what_is_installed_runs_by_itself_and_takes_no_common_name(installed: Path) -> None:
    """-I leaves out the folder of now; the checkout is on the path of its own environment, so it is taken off."""
    program = f"""
import sys
sys.path[:] = [{str(installed)!r}, *(entry for entry in sys.path if entry != {str(ROOT)!r})]
import importlib.util, pkgutil
import dualmap
from dualmap.cli.main import COMMANDS, main
taken = [package for package in {sorted(PACKAGES)!r} if importlib.util.find_spec(package)]
assert not taken, taken
assert dualmap.__file__.startswith({str(installed)!r})
of_a_checkout = {{command.module for command in COMMANDS.values() if command.of_a_checkout}}
for module in pkgutil.walk_packages(dualmap.__path__, "dualmap."):
    if module.name not in of_a_checkout | {{"dualmap.__main__"}}:
        importlib.import_module(module.name)
main(["--help"])
sys.exit(main(["simulate", "--trace", "uniform", "--requests", "20", "--instances", "2"]))  # with the store's scripts
"""
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "laboratory" not in done.stdout, "experiments run from a checkout"


@pytest.mark.parametrize("environment", [{"DUALMAP_NATIVE": "no"}, {"CC": "false"}], ids=["unwanted", "no compiler"])
def test_a_wheel_without_native_parts_is_for_every_machine(tmp_path: Path, environment: dict[str, str]) -> None:
    wheel = built("wheel", tmp_path, **environment)

    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.skipif(NATIVE is None, reason="native parts cannot be built here")
def test_a_wheel_with_native_parts_is_for_its_machine_and_every_python(tmp_path: Path) -> None:
    wheel = built("wheel", tmp_path, DUALMAP_NATIVE="yes")

    assert "-cp311-abi3-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        extensions = {name for name in archive.namelist() if name.endswith(".so")}
    assert extensions == {f"{source.rpartition('/')[0]}/_{Path(source).stem}.abi3.so" for source in NATIVE_SOURCES}


def test_a_build_that_must_have_native_parts_fails_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        built("wheel", tmp_path, DUALMAP_NATIVE="yes", CC="false")

    assert b"the native plain_list cannot be built" in failed.value.stderr + failed.value.stdout


def test_a_source_distribution_holds_each_room_once(tmp_path: Path) -> None:
    """A wheel is made from it where there are no links."""
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {name for name in names if name.endswith("cli/main.py")} == {"dualmap/cli/main.py"}
    assert {"dualmap/statestore/pool/codec.py", "hatch_build.py"} <= names
    assert names >= NATIVE_SOURCES
