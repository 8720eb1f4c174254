import json
from pathlib import Path
from typing import Any

import pytest

from dualmap.cli.main import main

CONFIG = """
scheduling:
  policy: preble
  queue_order: deadline
router:
  late_requests: refuse
pools:
  - name: default
    instances:
      - {id: one, url: "http://one:8000", kv_capacity_tokens: 400000}
      - {id: two, url: "http://two:8000"}
"""


def test_the_configured_fleet_is_what_is_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy, instances, queues in the fleet, and what becomes of late requests."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "fleet.yaml").write_text(CONFIG)
    words = ["simulate", "--trace", "uniform:requests=200", "--rate", "30", "--quiet", "--workers", "1"]

    code = main([*words, "--config", str(tmp_path / "fleet.yaml"), "--json", str(tmp_path / "r.json")])

    (row,) = json.loads((tmp_path / "r.json").read_text())
    assert code == 0
    assert (row["policy"], row["instances"]) == ("preble", 2)
    assert row["refused"] > 0, "late requests are refused"
    assert max(sample["held_requests"] for sample in row["samples"]) > 0, "and those that are not wait in the fleet"


def _simulated(folder: Path, *words: str) -> list[dict[str, Any]]:
    run = ["simulate", "--trace", "hotspot:requests=300", "--rate", "20", "--instances", "4", "--quiet"]
    assert main([*run, "--workers", "1", "--json", str(folder / "r.json"), *words]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "r.json").read_text())
    return rows


def test_parameters_of_a_policy_are_the_simulators_or_those_of_the_configured_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stuck = {"cache_threshold": 0.0, "balance_abs_threshold": 10**6}

    plain, other = _simulated(tmp_path, "--policy", "sglang,llm-d")
    changed, same = _simulated(tmp_path, "--policy", "sglang,llm-d", "--policy-options", json.dumps({"sglang": stuck}))
    settings = ["--scheduling.policy", "sglang", "--scheduling.policy_options", json.dumps(stuck)]
    (configured,) = _simulated(tmp_path, *settings)

    assert changed["hit_rate"] > plain["hit_rate"], "never balanced"
    assert (same, configured) == (other, changed)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{", "--policy-options is not JSON"),
        ('{"sglang": 1}', '--policy-options must read {"POLICY": {"NAME": VALUE}}'),
        ('{"dynamo": {}}', "'dynamo' is no policy that is simulated"),
        ('{"sglang": {"cache_threshold": 2}}', "--policy-options: cache_threshold: "),
        ('{"sglang": {"threshold": 2}}', "--policy-options: policy sglang has no option threshold; it has"),
    ],
)
def test_wrong_parameters_of_a_policy_are_named(options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", "uniform:requests=20", "--rate", "3", "--policy", "sglang", "--policy-options", options]

    assert main(["simulate", *words]) == 2
    assert said in capsys.readouterr().err
