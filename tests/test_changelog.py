"""Every fragment of the changelog is well-formed, and becomes an entry of the next release."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "towncrier.toml").read_text("utf-8"))["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in SETTINGS["type"]]
FOLDER = ROOT / SETTINGS["directory"]
LONGEST_LINE = 120


def faults(fragment: Path) -> Iterator[str]:
    """Return what is wrong with a fragment, in words that say what to write."""
    if not re.fullmatch(rf"[a-z0-9]+(-[a-z0-9]+)*\.({'|'.join(KINDS)})\.md", fragment.name):
        yield f"{fragment.name}: name it NAME.KIND.md, NAME of lower-case words with hyphens, KIND one of {KINDS}"
    text = fragment.read_text("utf-8").strip("\n")
    if not text or "\n\n" in text:
        yield f"{fragment.name}: write one paragraph; several changes are several fragments"
    if not re.match(r"[A-Z0-9`/]", text) or not text.endswith("."):
        yield f"{fragment.name}: write whole sentences, without a heading or the mark of a list"
    if any(len(line) > LONGEST_LINE for line in text.splitlines()):
        yield f"{fragment.name}: break its lines at {LONGEST_LINE} characters"


def fragments(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path != folder / "template.md"]


def test_every_fragment_is_well_formed() -> None:
    assert [fault for fragment in fragments(FOLDER) for fault in faults(fragment)] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a-name.md", "One is new."),
        ("a-name.news.md", "One is new."),
        ("A name.fix.md", "One is new."),
        ("a-name.fix.md", ""),
        ("a-name.fix.md", "One is new.\n\nTwo are new."),
        ("a-name.fix.md", "- One is new."),
        ("a-name.fix.md", "One is new"),
        ("a-name.fix.md", "One is" + " very" * 30 + " new."),
    ],
)
def test_a_fragment_that_is_not_well_formed_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, "utf-8")

    assert [fault for fault in faults(tmp_path / name) if fault.startswith(name)]


def test_a_release_moves_the_fragments_into_a_dated_section_above_the_others(tmp_path: Path) -> None:
    for name in ("towncrier.toml", SETTINGS["filename"]):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(FOLDER, tmp_path / FOLDER.name)
    (tmp_path / FOLDER.name / "one.fix.md").write_text("A request of one token\nis answered.\n")
    earlier = (tmp_path / SETTINGS["filename"]).read_text("utf-8").partition(SETTINGS["start_string"])[2]
    build = (sys.executable, "-m", "towncrier", "build", "--yes", "--version", "9.8.7", "--date", "2031-02-03")

    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True, timeout=60)

    built = (tmp_path / SETTINGS["filename"]).read_text("utf-8").partition(SETTINGS["start_string"])[2]
    section, _, rest = built.partition("## 9.8.7 (2031-02-03)\n")[2].partition("\n## ")
    assert re.search(r"### Fixed\n\n(- .*\n(  .*\n)*)*- A request of one token\n  is answered\.\n", section)
    assert f"## {rest}" == earlier.strip("\n") + "\n"
    assert fragments(tmp_path / FOLDER.name) == []
