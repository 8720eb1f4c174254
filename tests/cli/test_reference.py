"""The generated reference of settings."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import yaml

from dualmap.cli.main import main
from dualmap.cli.reference import markdown, sections, with_request_fields
from dualmap.cli.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"


def test_the_page_in_the_repository_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: make docs"


def test_the_fields_of_a_request_on_the_page_of_redis_keys_are_current() -> None:
    page = (PAGE.parent / "redis-keys.md").read_text(encoding="utf-8")

    assert with_request_fields(page) == page, "run: make docs"
    assert "| `uncached_tokens` | `placed` | prompt tokens" in page


def test_the_schema_of_the_charts_values_is_current() -> None:
    """Helm checks settings before they reach a cluster: a new one must be known there too."""
    folder = PAGE.parents[2] / "deploy" / "helm"

    written = runpy.run_path(str(folder / "schema.py"))["text"]()

    assert (folder / "dualmap" / "values.schema.json").read_text(encoding="utf-8") == written, "run: make docs"


def test_every_setting_is_described() -> None:
    rows = [row for _, _, rows in sections() for row in rows]
    assert len(rows) > 50
    assert [row.path for row in rows if not row.description] == []


def test_every_type_has_a_name_that_no_programmer_needs() -> None:
    rows = {row.path: row.kind for _, _, rows in sections() for row in rows}
    assert rows["router.record_dir"] == "path or none"
    assert [path for path, kind in rows.items() if "<" in kind] == []


def test_nested_lists_are_listed_with_their_items() -> None:
    paths = {row.path for _, _, rows in sections() for row in rows}
    assert {"router.port", "pools[].model", "pools[].instances[].url"} <= paths


def test_the_settings_in_effect_are_printed_as_a_file_that_can_be_read_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secrets = ["--router.admin_key", "hunter2", "--store.url", "redis://fleet:hunter2@store:6379/0"]
    assert main(["settings", "--router.port", "1234", *secrets]) == 0

    printed = capsys.readouterr().out

    assert "hunter2" not in printed
    assert "store:6379/0" in printed
    assert Settings.model_validate(yaml.safe_load(printed)).router.port == 1234
