"""The scenarios, and the page that describes what they bring about."""

from __future__ import annotations

from pathlib import Path

from dualmap.research.chaos.checker import Outcome
from dualmap.research.chaos.scenarios import SCENARIOS, SOAKED

FAULTS = Path(__file__).resolve().parents[3] / "docs" / "operate" / "faults.md"


def described() -> set[str]:
    """The symptoms of the table at the head of the page."""
    table = FAULTS.read_text(encoding="utf-8").partition("| symptom |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    return {row for row in rows if not row.startswith(("**", "---"))}


def test_every_fault_of_the_page_has_a_scenario_and_every_scenario_its_fault() -> None:
    symptoms = {scenario.symptom for scenario in SCENARIOS.values()} - {""}

    assert symptoms == described()


def test_no_scenario_allows_what_no_client_may_see() -> None:
    for scenario in SCENARIOS.values():
        assert not scenario.allowed & {Outcome.WRONG, Outcome.STUCK}, scenario.name


def test_a_soak_draws_known_scenarios() -> None:
    assert set(SOAKED) <= set(SCENARIOS)


def test_the_page_lists_every_scenario() -> None:
    text = FAULTS.read_text(encoding="utf-8")

    assert [name for name in SCENARIOS if f"`{name}`" not in text] == []
