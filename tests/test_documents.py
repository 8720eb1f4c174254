"""The documents hold together: what they link to exists."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dualmap.cli.show_settings import sections

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / name for name in OUTSIDE)]
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def broken_links(page: Path) -> Iterator[str]:
    for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link}: no such file"
        elif anchor and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_every_link_between_the_documents_leads_somewhere() -> None:
    assert [broken for page in PAGES for broken in broken_links(page)] == []


def test_every_page_is_named_by_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(index.read_text("utf-8"))}

    assert {page for page in PAGES if index.parent in page.parents} - {index} <= named


def test_a_broken_link_would_be_found() -> None:
    page = ROOT / "docs" / "index.md"
    assert anchors(ROOT / "docs" / "concepts" / "architecture.md") >= {"glossary", "the-life-of-a-request"}
    assert _LINK.findall("[a](b.md#c) [d](https://e)") == ["b.md#c"]
    assert "start" not in anchors(page)


def texts() -> Iterator[Path]:
    """Everything that people read: documents, and sources for their messages and comments. Tests are left out."""
    yield from PAGES
    yield from (ROOT / name for name in ("Makefile", "Dockerfile", "mkdocs.yml", "docker-compose.yml"))
    for folder in ("dualmap", "examples", "benchmarks", "deploy"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".yaml", ".yml"})


def installed_by_name(text: str) -> list[str]:
    """Commands that would take the project from an index, which has none of that name."""
    return re.findall(r"dualmap-fleet\[[\w,]+\]|pip install (?:-\S+ )*[\"']?dualmap-fleet\b.*", text)


def test_no_text_installs_the_project_from_an_index() -> None:
    found = {path: installed_by_name(path.read_text("utf-8")) for path in texts()}

    assert {path: commands for path, commands in found.items() if commands} == {}
    assert installed_by_name("pip install 'dualmap-fleet[tokens]', or") == ["pip install 'dualmap-fleet[tokens]', or"]
    assert installed_by_name("(dualmap-fleet[tokens])") == ["dualmap-fleet[tokens]"]


def test_extras_targets_and_scripts_that_texts_name_exist() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    targets = set(re.findall(r"^([a-z]+)(?= |:)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named: dict[str, set[str]] = {"extra": set(), "target": set(), "script": set()}
    for text in (path.read_text("utf-8") for path in texts()):
        named["extra"] |= set(re.findall(r"pip install[^\n]*\[([a-z]+)\]['\"]", text))
        named["extra"] |= {extra for several in re.findall(r"EXTRAS=([a-z,]+)", text) for extra in several.split(",")}
        named["target"] |= set(re.findall(r"`make ([a-z]+)", text))
        named["script"] |= set(re.findall(r"(?:^|[ `])(scripts/[a-z]+|deploy/[a-z-]+)(?=[ `\n])", text, re.MULTILINE))

    assert {"evaluation", "tokens", "tracing"} <= named["extra"] <= extras
    assert named["target"] <= targets
    assert {script for script in named["script"] if not (ROOT / script).exists()} == set()


@cache
def settings_and_sections() -> frozenset[str]:
    names = {name for path, _, rows in sections() for name in (path, *(row.path for row in rows))}
    return frozenset(names | {name.removesuffix("[]") for name in names})


def unknown_settings(text: str) -> list[str]:
    """The names between backquotes that start like a setting's and are none."""
    known = settings_and_sections()
    starts = {name.partition(".")[0].removesuffix("[]") for name in known} - {"upstream"}  # which Envoy has, too
    named = re.findall(r"`(?:--)?([a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+)[`=: ]", text)
    return [name for name in named if name.partition(".")[0].removesuffix("[]") in starts and name not in known]


def test_settings_that_the_documents_name_exist() -> None:
    assert {page: names for page in PAGES if (names := unknown_settings(page.read_text("utf-8")))} == {}
    assert unknown_settings("`router.port`, `--router.prot 1` and `pools[].no_such`") == [
        "router.prot",
        "pools[].no_such",
    ]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def test_faults_are_found_by_short_cells_and_by_messages_that_the_product_has() -> None:
    page = (ROOT / "docs" / "operate" / "faults.md").read_text("utf-8")
    _, _, table = page.partition("| symptom | command | expected output | what the fleet does |")
    rows = [cells(row) for row in table.partition("\n\n")[0].splitlines()[2:]]
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "dualmap").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)

    assert len(rows) > 20
    for symptom, command, output, response in rows:
        if not command:
            continue  # the name of a group
        for cell, most in ((symptom, 12), (command, 8), (output, 25), (response, 25)):
            assert 0 < len(cell.split()) <= most, cell
        for quoted in re.findall(r"`([^`]+)`", output):
            words = re.split(r"\(down\): |…|:?\d\S*|[:=]|from ", quoted)
            fixed = [part.strip() for part in words if len(part.split()) >= 3]
            assert [part for part in fixed if part not in sources] == [], quoted


def test_headings_links_and_descriptions_stand_alone() -> None:
    """None needs the sentence or the row before it: a reader may see nothing else."""
    leaning = re.compile(r"(its|it|their|theirs|they|them|those|these|of)\b", re.IGNORECASE)
    labels: list[str] = []
    for page in PAGES:
        text = _FENCE.sub("", page.read_text("utf-8"))
        labels += re.findall(r"^#+ (.+)$", text, re.MULTILINE) + re.findall(r"(?<!!)\[([^\]]+)\]\(", text)
    settings = (ROOT / "docs" / "reference" / "configuration.md").read_text("utf-8")
    labels += [cells(row)[-1] for row in settings.splitlines() if row.startswith("| `")]

    assert [label for label in labels if leaning.match(label)] == []


def test_every_page_is_part_of_the_site() -> None:
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents}

    assert set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)) == pages


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material")
    words = ["-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]

    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "What it changes" not in (tmp_path / "index.html").read_text("utf-8")
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text("utf-8"))
        assert loaded == [], page
