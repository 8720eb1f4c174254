from dataclasses import replace

import pytest

from dualmap.research.provenance import Provenance
from dualmap.research.suites.document import blocks_of, filled
from dualmap.simulation.errors import SimulationError
from tests.research.suites.samples import crossed, outcome

MADE = replace(crossed(), made=Provenance("abc123", "2026-11-22", "dualmap laboratory"))
TEXT = """# Title

<!-- laboratory lab: made -->
old
<!-- end -->

Words stay.

<!-- laboratory lab: order-and-placement-goodput-with-99-on-time -->
<!-- end -->
"""


def test_blocks_are_written_and_all_else_stays() -> None:
    text = filled(TEXT, "lab", MADE)

    assert "old" not in text
    assert "Commit abc123, 2026-11-22: `dualmap laboratory`. Seeds: 2; 400 requests an instance." in text
    assert "| uniform, 8 × 7B | 12.00 | b 10.00 | +20.0 ± 0.0 % |" in text
    assert "Words stay." in text


def test_filling_again_changes_nothing() -> None:
    once = filled(TEXT, "lab", MADE)

    assert once.count("<!-- end -->") == TEXT.count("<!-- end -->")
    assert filled(once, "lab", MADE) == once


def test_every_variant_stands_in_the_overview() -> None:
    blocks = blocks_of(MADE)

    assert "| c fifo | 8.00 ± 0.00 |" in blocks["every-policy-goodput-with-90-on-time"]
    lengths = blocks["by-length-of-prompts-at-1.5-saturation"].splitlines()
    assert [line.split(" | ")[1] for line in lengths[2:6]] == ["a deadline", "b deadline", "a fifo", "b fifo"]


def test_a_block_that_no_table_has_is_named() -> None:
    with pytest.raises(SimulationError, match="asks for 'made'"):
        filled(TEXT, "lab", outcome())


def test_blocks_of_other_results_stay() -> None:
    assert filled(TEXT, "other", MADE) == TEXT
