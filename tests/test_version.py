"""The version follows from the newest tag of the commit, wherever the package is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("pyproject.toml", ".gitattributes", ".git_archival.txt")


def run(folder: Path, *command: str, **environment: str) -> str:
    found = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 0, found.stdout
    return found.stdout


def version(folder: Path, **environment: str) -> str:
    """As a build there would name itself."""
    return run(folder, sys.executable, "-m", "hatchling", "version", **environment).split()[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout without git, and what its version follows from."""
    made = tmp_path / "source"
    made.mkdir()
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, made)
    return made


@pytest.fixture
def checkout(folder: Path) -> Path:
    """A repository of one commit, without a tag."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "One")):
        git(folder, *words)
    return folder


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=one", "-c", "user.email=one@localhost", "-c", "commit.gpgsign=false")
    return run(folder, "git", *who, *words)


def archive(checkout: Path) -> Path:
    """Return what ``git archive`` of the checkout's commit contains."""
    unpacked = checkout.parent / "archive"
    shutil.rmtree(unpacked, ignore_errors=True)
    unpacked.mkdir()
    packed = checkout.parent / "archive.tar"
    git(checkout, "archive", "--output", str(packed), "HEAD")
    shutil.unpack_archive(packed, unpacked, "tar")
    return unpacked


def test_a_commit_with_a_tag_is_that_version_in_a_checkout_and_in_its_archive(checkout: Path) -> None:
    git(checkout, "tag", "v1.4.0")
    git(checkout, "tag", "experiment-3")

    assert version(checkout) == "1.4.0"
    assert version(archive(checkout)) == "1.4.0"


def test_a_commit_after_a_tag_is_on_its_way_to_the_next_version(checkout: Path) -> None:
    git(checkout, "tag", "v1.4.0")
    git(checkout, "commit", "--allow-empty", "-qm", "Two")

    assert re.fullmatch(r"1\.4\.1\.dev1\+g[0-9a-f]+", version(checkout))
    assert re.fullmatch(r"1\.4\.1\.dev1\+g[0-9a-f]+", version(archive(checkout)))


def test_a_checkout_without_tags_has_a_version_below_the_first(checkout: Path) -> None:
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version(checkout))


def test_a_build_without_git_is_version_0_0_unless_it_is_told_one(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "tag", "v1.4.0")
    nothing = tmp_path / "bin"
    nothing.mkdir()

    assert version(checkout, PATH=str(nothing)) == "0.0"
    shutil.rmtree(checkout / ".git")
    assert version(checkout) == "0.0"
    assert version(checkout, SETUPTOOLS_SCM_PRETEND_VERSION="") == "0.0", "as the image is built without VERSION"
    assert version(checkout, SETUPTOOLS_SCM_PRETEND_VERSION="1.4.0") == "1.4.0"
