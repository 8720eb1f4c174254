import argparse
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dualmap.research.evaluate import command, overhead, scaling
from dualmap.research.evaluate.plan import DEFAULT_POLICY, FULL, QUICK, Plan, scheduling_for
from dualmap.research.evaluate.rates import goodput_finding
from dualmap.research.evaluate.report import render_html, render_json, rules_of, show
from dualmap.research.evaluate.run import evaluate
from dualmap.research.evaluate.section import Section
from dualmap.research.evaluate.work import Worker
from dualmap.scheduling.placing.policies.registry import granting_order
from dualmap.scheduling.settings import PolicyName, SchedulingSettings
from dualmap.simulation.commands.options import OptionError
from dualmap.simulation.settings import EngineSettings
from dualmap.simulation.sources import TraceSource

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
    scaling_requests=60,
    day_requests=200,
    day_s=60,
    constant_s=20,
    balance_requests=200,
    balance_trials=1,
    overhead_sizes=(2, 4),
    overhead_repetitions=20,
)


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def sections(steps: list[tuple[str, int, int]]) -> list[Section]:
    return evaluate(TINY, Worker(1, lambda *step: steps.append(step)))


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
    wanted = command.sections_of("overhead, balance")
    heard: list[str] = []

    found = evaluate(TINY, Worker(1, lambda name, done, total: heard.append(name)), wanted)

    assert [section.name for section in found] == ["balance", "overhead"], "in the order of the report"
    assert "policies over rates" not in heard
    with pytest.raises(OptionError, match="there is no 'metadata'"):
        command.sections_of("metadata")


def plan_of(*options: str) -> Plan:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.plan_of(parser.parse_args(options))


def test_every_experiment_can_have_another_engine() -> None:
    changed = plan_of("--quick", "--engine", "prefill_first+kv_capacity_tokens=500000")
    engines = [one.workload("toolagent", "qwen2.5-7b-910b4", 80).engine for one in (plan_of("--quick"), changed)]

    assert [(one.prefill_first, one.kv_capacity_tokens) for one in engines] == [(False, 1_000_000), (True, 500_000)]
    assert "Engines changed by 'prefill_first+kv_capacity_tokens=500000'." in rules_of(changed)
    assert not any(rule.startswith("Engines changed") for rule in rules_of(TINY))
    with pytest.raises(OptionError, match="unknown change 'decode_first'"):
        plan_of("--engine", "decode_first")


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
    page.feed(render_html(TINY, sections, rules_of(TINY)))

    assert page.ids == [section.name for section in sections]
    assert page.svgs == sum(len(section.plots) for section in sections) > 30
    assert page.links == 0


def test_the_json_holds_every_table(sections: list[Section]) -> None:
    document = json.loads(render_json(TINY, sections))

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
    assert scheduling_for("dynamo") == SchedulingSettings(policy="dynamo")
    assert granting_order(scheduling_for("dualmap")) == "fifo"
    assert granting_order(scheduling_for("dualmap-least-cost")) == "deadline"


def test_the_full_plan_is_the_papers() -> None:
    assert (FULL.conversation_requests, FULL.toolagent_requests, FULL.skip_requests) == (4000, 8000, 500)
    assert FULL.scalability[-1] * FULL.requests_per_instance == 32_000


@pytest.mark.parametrize(
    ("cell", "text"),
    [(3, "3"), ("a", "a"), (0.12345, "0.12"), (123.4, "123.4"), (12345.6, "12,346"), (float("inf"), "∞")],
)
def test_numbers_are_shown_with_the_digits_that_mean_something(cell: object, text: str) -> None:
    assert show(cell) == text  # type: ignore[arg-type]


def test_a_broken_trace_stops_before_anything_runs_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text("{}\n")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = tmp_path / "out"
    words = ["--quick", "--quiet", "--toolagent", str(tmp_path / "broken.jsonl"), "--out", str(out)]

    code = command.run(parser.parse_args(words), SchedulingSettings(), EngineSettings())

    assert code == 2
    assert "broken.jsonl:1: timestamp must be a number" in capsys.readouterr().err
    assert not out.exists()
