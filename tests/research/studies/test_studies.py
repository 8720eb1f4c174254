import json
import re
import textwrap
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dualmap.research.bench import Bench
from dualmap.research.report import Section, render_html, render_json
from dualmap.research.run_cache import RunCache
from dualmap.research.studies import overhead, scaling
from dualmap.research.studies.plan import DEFAULT_POLICY, FULL, QUICK, Plan, rules_of, variant_of
from dualmap.research.studies.rates import goodput_finding
from dualmap.research.studies.registry import STUDIES, run_studies
from dualmap.research.suites.study import suite_section
from dualmap.research.suites.suite import SUITES, Suite
from dualmap.scheduling.placing.policies.registry import granting_order
from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.simulation.virtual_time.runs import RunJob
from dualmap.simulation.workload.sources import TraceSource

pytestmark = pytest.mark.timeout(600)  # the first test runs all experiments: minutes of computing on a slow machine

TINY: Plan = replace(
    QUICK,
    conversation_requests=80,
    toolagent_requests=100,
    skip_requests=20,
    policies=("dualmap", DEFAULT_POLICY, "preble"),
    load_factors=(0.5, 1.5),
    goodput_tolerance=0.4,
    scalability=(2, 4),
    requests_per_instance=15,
    scaling_requests=40,
    day_requests=120,
    day_s=60,
    constant_s=20,
    split_loads=(0.9,),
    balance_requests=200,
    balance_trials=1,
    overhead_sizes=(2, 4),
    overhead_repetitions=20,
)


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> RunCache:
    return RunCache(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def sections(steps: list[tuple[str, int, int]], cache: RunCache) -> list[Section]:
    return run_studies(TINY, Bench(cache=cache, on_step=lambda *step: steps.append(step)))


def test_every_experiment_of_the_paper_has_its_section(sections: list[Section]) -> None:
    assert [section.name for section in sections] == [
        "capacity", "goodput", "pareto", "ablation", "orders", "prefill_first", "hotspots", "elasticity",
        "autoscaling", "constant_load", "scalability", "disaggregation", "key_lengths", "prefixes", "balance",
        "overhead",
    ]  # fmt: skip
    assert all(section.tables for section in sections)
    for section in sections:
        for table in section.tables:
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.columns)}, f"{section.name}: {table.title}"


def test_single_experiments_are_run_alone() -> None:
    heard: list[str] = []

    found = run_studies(TINY, Bench(on_step=lambda name, done, total: heard.append(name)), ("overhead", "balance"))

    assert [section.name for section in found] == ["balance", "overhead"], "in the order of the report"
    assert "policies over rates" not in heard


def test_figures_from_the_cache_make_the_same_tables(
    sections: list[Section], cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("goodput", "disaggregation")
    made = [section for section in sections if section.name in wanted]
    monkeypatch.setattr(RunJob, "run", lambda job: pytest.fail(f"it is in the cache: {job}"))

    again = run_studies(TINY, Bench(cache=cache), wanted)

    assert [section.tables for section in again] == [section.tables for section in made]
    assert [section.findings for section in again] == [section.findings for section in made]


def test_the_study_of_the_documents_runs_as_it_stands_there() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "contribute" / "steps.md"
    example = re.search(r"## An experiment\n.*?```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}

    exec(textwrap.dedent(example[1]), names)
    section = names["orders_at_peak"](TINY, Bench())

    (table,) = section.tables
    assert [row[0] for row in table.rows] == ["fifo", "deadline"]
    assert all(isinstance(cell, float) for row in table.rows for cell in row[1:])


def test_shared_prefixes_are_those_of_the_papers_two_traces(sections: list[Section]) -> None:
    (table,) = next(section for section in sections if section.name == "prefixes").tables

    assert [row[0] for row in table.rows] == ["Conversation", "Tool&Agent"]


def test_every_suite_is_a_study_among_the_others(tiny_suite: Suite) -> None:
    assert SUITES.keys() < STUDIES.keys()
    suite = replace(tiny_suite, rates=("3",), goodput=False, variants=("ours=dualmap-least-cost", "peer=preble"))

    section = suite_section(suite, Bench())

    assert section.tables[0].title == "At fixed loads"
    assert section.question.startswith("2 variants under 1 workloads, 2 seeds of each, ours against the best")
    assert "At fixed loads" in json.loads(render_json({}, [section], ()))["sections"]["tiny"]["tables"]


def test_all_policies_rates_traces_and_presets_are_compared(sections: list[Section]) -> None:
    tables = {table.title: table for table in sections[0].tables}

    assert tables.keys() == {"Conversation, 7B", "Conversation, 14B", "Tool&Agent, 7B", "Tool&Agent, 14B"}
    for table in tables.values():
        assert [row[0] for row in table.rows] == ["dualmap", DEFAULT_POLICY, "preble"] * 2
        assert len({row[1] for row in table.rows}) == 2


def test_progress_is_told_to_its_end(sections: list[Section], steps: list[tuple[str, int, int]]) -> None:
    last = {name: (done, total) for name, done, total in steps}

    assert "policies over rates" in last
    assert all(done == total > 0 for done, total in last.values())


def test_the_report_is_one_page_with_every_section_and_plot(sections: list[Section]) -> None:
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.ids: list[str] = []
            self.svgs = 0
            self.links = 0

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            self.svgs += tag == "svg"
            self.links += (given.get("src") or "").startswith("http")
            if tag == "h2":
                self.ids.append(given["id"] or "")

    page = Tags()
    page.feed(render_html("Report", sections, rules_of(TINY)))

    assert page.ids == [section.name for section in sections]
    assert page.svgs == sum(len(section.plots) for section in sections) > 30
    assert page.links == 0


def test_the_json_holds_every_table(sections: list[Section]) -> None:
    document = json.loads(render_json(asdict(TINY), sections, rules_of(TINY)))

    assert document["plan"]["name"] == "quick"
    assert document["sections"].keys() == {section.name for section in sections}
    row = document["sections"]["goodput"]["tables"]["Goodput"][0]
    assert (row["workload"], row["policy"]) == ("Conversation, 7B", "dualmap")


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (6.0, "DualMap wins over it: 6.00/s (+20.0%)"),
        (4.0, "DualMap loses to it: 4.00/s (-20.0%)"),
        (5.07, "DualMap is level with it: 5.07/s (+1.4%)"),
        (4.93, "DualMap is level with it: 4.93/s (-1.4%)"),
        (0.0, "DualMap loses to it: 0.00/s (-100.0%)"),
    ],
)
def test_wins_losses_and_ties_are_named_as_such(ours: float, verdict: str) -> None:
    finding = goodput_finding(
        {"dualmap": ours, "dualmap-least-cost": 8.0, "preble": 5.0, "sglang": 3.0}, resolution=0.015
    )

    assert finding.startswith("The best other project's policy is preble with 5.00/s. ")
    assert verdict in finding
    assert finding.endswith("dualmap-least-cost wins over it: 8.00/s (+60.0%).")


def test_every_workload_has_its_finding(sections: list[Section]) -> None:
    titles = [finding.split(":")[0] for finding in sections[1].findings if "best other" in finding]
    assert titles == [table.title for table in sections[0].tables]


def test_alone_it_is_not_compared_with_itself() -> None:
    assert goodput_finding({"dualmap": 5.0, "dualmap-least-cost": 6.0}, resolution=0.02) == (
        "DualMap 5.00/s, dualmap-least-cost 6.00/s; no other project's policy was run."
    )


def test_the_default_policy_is_in_every_experiment_that_compares_policies() -> None:
    assert DEFAULT_POLICY in FULL.policies
    assert DEFAULT_POLICY in scaling.POLICIES
    assert DEFAULT_POLICY in overhead.POLICIES


def test_the_findings_on_capacity_and_scaling_name_the_default_policy(sections: list[Section]) -> None:
    capacity, elasticity = sections[0], next(section for section in sections if section.name == "elasticity")

    assert all(DEFAULT_POLICY in finding for finding in (*capacity.findings, *elasticity.findings))


@pytest.mark.parametrize("policy", overhead.POLICIES)
def test_the_cost_of_every_step_is_measured(policy: PolicyName) -> None:
    costs = overhead.measure_steps(policy, 4, TraceSource("toolagent", 40).load(), repetitions=80)

    assert min(costs.searching_us, costs.placing_us, costs.releasing_us) > 0


def test_splits_stand_beside_mixed_instances_under_every_policy_and_way(sections: list[Section]) -> None:
    section = next(section for section in sections if section.name == "disaggregation")
    policies, ways = section.tables

    labels = ("Conversation, 7B", "Tool&Agent, 7B")
    assert [tuple(row[:3]) for row in policies.rows] == [
        (label, fleet, policy)
        for label in labels
        for fleet in ("8M", "4P4D", "5P3D", "6P2D")
        for policy in TINY.policies
    ]
    told = {(row[1], row[3]): row[4] for row in ways.rows if row[0] == "Tool&Agent, long answers"}
    assert {fleet for fleet, _ in told} == {"8M", "4P4D", "5P3D", "6P2D", "2P6D"}
    assert (told["4P4D", "always"], told["4P4D", "never"], told["8M", "-"]) == (100.0, 0.0, 0.0)
    assert sum("P90 TTFT over 4P4D" in finding for finding in section.findings) == 2
    assert sum("the decider is at worst" in finding for finding in section.findings) == 3


def test_two_choices_balance_better_than_one(sections: list[Section]) -> None:
    table = next(section for section in sections if section.name == "balance").tables[0]

    one, two = table.rows[0], table.rows[1]
    assert all(float(first) > float(second) for first, second in zip(one[1:], two[1:], strict=True))


def test_every_policy_runs_as_the_product_ships_it_and_dualmap_as_in_the_paper() -> None:
    assert variant_of("dynamo").scheduling == SchedulingSettings(policy="dynamo")
    assert granting_order(variant_of("dualmap").scheduling) == "fifo"
    assert granting_order(variant_of("dualmap-least-cost").scheduling) == "deadline"


def test_the_full_plan_is_the_papers() -> None:
    assert (FULL.conversation_requests, FULL.toolagent_requests, FULL.skip_requests) == (4000, 8000, 500)
    assert FULL.scalability[-1] * FULL.requests_per_instance == 32_000
