import argparse
from pathlib import Path

import pytest

from dualmap.research.commands import evaluate
from dualmap.research.studies.plan import Plan, rules_of
from dualmap.research.studies.registry import PAPER
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.commands.options import OptionError
from dualmap.simulation.engine.settings import EngineSettings


def plan_of(*options: str) -> Plan:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return evaluate.plan_of(parser.parse_args(options))


def test_all_sections_are_the_papers_and_a_suite_is_one_by_name() -> None:
    assert evaluate.sections_of("all") == tuple(PAPER)
    assert evaluate.sections_of("overhead, variations") == ("overhead", "variations")
    with pytest.raises(OptionError, match="there is no 'metadata'"):
        evaluate.sections_of("metadata")


def test_every_study_can_have_another_engine() -> None:
    plain, changed = plan_of("--quick"), plan_of("--quick", "--engine", "prefill_first+kv_capacity_tokens=500000")
    engines = [one.workload("toolagent", requests=80).engine for one in (plain, changed)]

    assert [(one.prefill_first, one.kv_capacity_tokens) for one in engines] == [(False, 1_000_000), (True, 500_000)]
    assert "Engines changed by 'prefill_first+kv_capacity_tokens=500000'." in rules_of(changed)
    assert not any(rule.startswith("Engines changed") for rule in rules_of(plain))
    with pytest.raises(OptionError, match="unknown change 'decode_first'"):
        plan_of("--engine", "decode_first")


def test_a_broken_trace_stops_before_anything_runs_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text("{}\n")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    out = tmp_path / "out"
    words = ["--quick", "--quiet", "--toolagent", str(tmp_path / "broken.jsonl"), "--out", str(out)]

    code = evaluate.run(parser.parse_args(words), SchedulingSettings(), EngineSettings())

    assert code == 2
    assert "broken.jsonl:1: timestamp must be a number" in capsys.readouterr().err
    assert not out.exists()
