import json
from pathlib import Path

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
