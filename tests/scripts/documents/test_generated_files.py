"""The generated documents in the repository are what their generators write."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest

from dualmap.cli.main import COMMANDS
from scripts.documents.__main__ import files

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def generated() -> Mapping[Path, str]:
    return files(DOCS)


def test_the_generated_files_in_the_repository_are_current(generated: Mapping[Path, str]) -> None:
    assert {path: path.read_text("utf-8") for path in generated} == generated, "run: make docs"


def test_every_file_that_says_that_it_is_generated_has_its_generator(generated: Mapping[Path, str]) -> None:
    marked = {
        path
        for path in DOCS.rglob("*")
        if path.suffix in {".md", ".svg"} and "enerated by make docs" in path.read_text("utf-8").replace("`", "")
    }

    assert marked == set(generated)


def test_the_page_of_the_command_line_has_every_command_with_its_options() -> None:
    page = (REFERENCE / "command-line.md").read_text("utf-8")

    assert all(f"## `dualmap {name}`\n" in page for name in COMMANDS)
    assert "| `--sort {name,ahead,held,running,kv,state}` |" in page


def test_the_page_of_http_has_every_endpoint_of_operators() -> None:
    page = (REFERENCE / "http.md").read_text("utf-8")

    assert "| `GET /admin/explain/{request_id}?local=` | One request: its hash key" in page


def test_the_page_of_redis_keys_has_the_fields_of_a_request() -> None:
    page = (REFERENCE / "redis-keys.md").read_text("utf-8")

    assert "| `uncached_tokens` | `placed` | prompt tokens" in page


def test_the_schema_of_the_charts_values_is_current() -> None:
    """Helm checks settings before they reach a cluster: a new one must be known there too."""
    folder = ROOT / "deploy" / "helm"

    written = runpy.run_path(str(folder / "schema.py"))["text"]()

    assert (folder / "dualmap" / "values.schema.json").read_text(encoding="utf-8") == written, "run: make docs"
