"""The version stands in pyproject.toml, and all that states or builds one follows from it."""

from __future__ import annotations

import email
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
CHART = ROOT / "deploy" / "helm" / "dualmap" / "Chart.yaml"


def newest_release() -> str:
    """The version of the first section of the changelog."""
    found = re.search(r"^## (\S+) \(\d{4}-\d{2}-\d{2}\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert found, "no dated section"
    return found[1]


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    assert newest_release() == VERSION


def test_the_chart_and_the_image_that_it_takes_are_this_version() -> None:
    chart = yaml.safe_load(CHART.read_text("utf-8"))

    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_every_file_that_states_the_version_is_as_it_is_written_from_it() -> None:
    written = runpy.run_path(str(ROOT / "deploy" / "helm" / "version.py"))["texts"]()

    assert [name for name, text in written.items() if text != (ROOT / name).read_text("utf-8")] == [], "make docs"
    assert all(VERSION in text for text in written.values())


def test_documents_and_manifests_name_no_image_of_another_version() -> None:
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.yaml"), *ROOT.glob("docker-compose*.yml")]
    named = {tag for path in files for tag in re.findall(r"\bdualmap-fleet:([\w.]+)", path.read_text("utf-8"))}

    assert named == {VERSION, "latest"}, "latest: what Compose builds for itself"


def test_a_source_archive_has_this_version_where_there_is_neither_git_nor_a_tag(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "dualmap").mkdir(parents=True)
    (source / "dualmap" / "__init__.py").touch()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)

    build = (sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path))
    subprocess.run(build, cwd=source, env={"PATH": str(tmp_path)}, check=True, capture_output=True, timeout=60)

    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        metadata = packed.extractfile(f"dualmap_fleet-{VERSION}/PKG-INFO")
        assert metadata is not None
        assert email.message_from_bytes(metadata.read())["Version"] == VERSION
