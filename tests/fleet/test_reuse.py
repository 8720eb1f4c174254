"""What the method is for: requests that share a prefix meet on at most two instances, and round robin shows the contrast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from fleet_process import Fleet, running_fleet
from openai import OpenAI

SESSIONS = 12
TURNS = 8
SMALL = ("--replicas", "2", "--workers", "1")


def placed_by_session(fleet: Fleet) -> list[Counter[str]]:
    """Instances that served each session; all turns of a session share several blocks, sessions share none."""
    placed = [Counter[str]() for _ in range(SESSIONS)]
    for turn in range(TURNS):
        for session in range(SESSIONS):
            # A client of its own for every request: connections spread over the replicas.
            with OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=0, timeout=30) as client:
                prompt = f"session {session:03d} " + "what was said so far, word for word " * 60 + f"turn {turn}"
                raw = client.completions.with_raw_response.create(model=fleet.model, prompt=prompt, max_tokens=1)
                placed[session][raw.headers["x-dualmap-instance"]] += 1
    return placed


def share_on_two(placed: list[Counter[str]]) -> float:
    """Share of requests that went to one of their session's two busiest instances."""
    on_two = sum(count for session in placed for _, count in session.most_common(2))
    return on_two / sum(session.total() for session in placed)


def test_dualmap_keeps_a_prefix_on_two_instances(fleet: Fleet) -> None:
    assert share_on_two(placed_by_session(fleet)) >= 0.95


@pytest.mark.parametrize("policy", ["round-robin"])
def test_other_policies_are_chosen_by_name(policy: str, tmp_path: Path) -> None:
    with running_fleet(tmp_path, ("--policy", policy, *SMALL)) as fleet:
        placed = placed_by_session(fleet)
    assert share_on_two(placed) < 0.75
    total = sum(placed, Counter[str]())
    assert max(total.values()) - min(total.values()) <= 2  # one turn order over both replicas
