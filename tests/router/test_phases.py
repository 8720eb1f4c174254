"""The tests of a request's phases are listed where the phases are described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "concepts" / "phases.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("folder", "column"), [("http", 2), ("requests", 3)])
def test_the_page_of_phases_lists_each_file_of_their_specification(folder: str, column: int) -> None:
    _, _, section = PAGE.partition("## Specification")
    rows = [line.split("|") for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    listed = {name for row in rows[2:] for name in re.findall(r"`(test_\w+\.py)`", row[column])}

    present = {path.name for path in (ROOT / "tests" / "router" / folder / "phases").glob("test_*.py")}

    assert present and listed == present
