"""The tables of the documents are those of the results beside them."""

from pathlib import Path

import pytest

from dualmap.research.suites.document import blocks_of, filled
from dualmap.research.suites.results_file import read_outcome

DOCS = Path(__file__).resolve().parents[3] / "docs" / "research"
PAGE = DOCS / "studies.md"
RESULTS = sorted(folder for folder in (DOCS / "results").iterdir() if folder.is_dir())


@pytest.mark.parametrize("folder", RESULTS, ids=lambda folder: folder.name)
def test_no_figure_of_a_table_was_typed_by_hand(folder: Path) -> None:
    text, experiment = PAGE.read_text(encoding="utf-8"), read_outcome(folder)

    command = f"dualmap laboratory --from docs/research/results/{folder.name} --document docs/research/{PAGE.name}"
    assert filled(text, folder.name, experiment) == text, f"run: {command}"
    assert "made" in blocks_of(experiment), "results name their commit, day and command"
    assert f"<!-- laboratory {folder.name}: made -->" in text
