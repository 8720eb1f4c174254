"""Requests that share a prefix meet on at most two instances, as the method wants. Round robin is the contrast."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.fleet.fleet_process import Fleet, running_fleet

SESSIONS = 13  # no multiple of the instances, or round robin would hit the same one every turn
TURNS = 8
SMALL = ("--replicas", "2", "--workers", "1")


def placed_by_session(fleet: Fleet) -> list[Counter[str]]:
    """Instances that served each session; all turns of a session share several blocks, sessions share none."""
    placed = [Counter[str]() for _ in range(SESSIONS)]
    for turn in range(TURNS):
        for session in range(SESSIONS):
            prompt = f"session {session:03d} " + "what was said so far, word for word " * 60 + f"turn {turn}"
            placed[session][fleet.placement(prompt)] += 1
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
