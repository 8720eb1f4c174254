"""Revisions of a fleet's instances on real processes: sessions stay as weights grow, and move at a rollback."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence

import pytest
import redis

from tests.fleet.fleet_process import Fleet, running_fleet, until

SESSIONS = range(40)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    words = ("--replicas", "2", "--workers", "1", "--instances", "4")
    with running_fleet(tmp_path_factory.mktemp("revisions"), words) as started:
        yield started


def revisions(fleet: Fleet, *words: str) -> str:
    return fleet.dualmap("revisions", "--url", fleet.endpoint, *words)


def served(fleet: Fleet, session: int, turns: int = 1, header: Sequence[tuple[str, str]] = ()) -> str:
    """The revision that answers a turn of a conversation, through any replica."""
    messages = [{"role": "user", "content": f"question {session}: " + "word " * 300}]
    for turn in range(turns - 1):
        messages += [{"role": "assistant", "content": f"answer {turn}"}, {"role": "user", "content": f"more {turn}"}]
    body = json.dumps({"model": fleet.model, "messages": messages, "max_tokens": 2}).encode()
    fields = {"content-type": "application/json", **dict(header)}
    asked = urllib.request.Request(f"{fleet.endpoint}/v1/chat/completions", body, fields)
    with urllib.request.urlopen(asked, timeout=60) as answer:
        answer.read()
        return str(fleet.instances()[answer.headers["x-dualmap-instance"]]["revision"])


def test_sessions_stay_as_a_weight_grows_and_move_at_a_rollback(fleet: Fleet) -> None:
    for place, name in enumerate(sorted(fleet.instances())):
        fleet.dualmap("instances", "label", name, "v2" if place < 2 else "v1", "--url", fleet.endpoint)
    assert "all instances serve all sessions" in revisions(fleet)

    revisions(fleet, "set", "v1=95%", "v2=5%")
    known_everywhere(fleet)
    first = {session: served(fleet, session) for session in SESSIONS}
    revisions(fleet, "set", "v2=50%")
    known_everywhere(fleet)
    second = {session: served(fleet, session, turns=2) for session in SESSIONS}
    new = [served(fleet, 1000 + session) for session in SESSIONS]
    revisions(fleet, "set", "v2=0", "--move")
    known_everywhere(fleet)
    third = {session: served(fleet, session, turns=3) for session in SESSIONS}

    assert second == first
    assert new.count("v2") > 8 > list(first.values()).count("v2")
    assert {*third.values()} == {"v1"}
    assert served(fleet, 1, header=[("x-dualmap-revision", "v2")]) == "v2"
    assert "v1 95 %, v2 5 %" in revisions(fleet, "audit")
    assert "v2 0 %, running sessions move" in [each["text"] for each in fleet.get("/admin/revisions/history")]


def test_a_shadow_gets_copies_and_answers_nobody(fleet: Fleet) -> None:
    fleet.dualmap("rollout", "--url", fleet.endpoint, "start", "v2", "--shadow", "100")
    known_everywhere(fleet)

    def compared() -> int:
        shown = fleet.get("/admin/rollout")["rollout"]
        assert (shown["state"], shown["percent"], shown["shadow_percent"]) == ("running", 0.0, 100.0)
        return int(shown["requests"].get("v2", 0))

    served_by = set()
    for session in range(12):
        served_by.add(streamed(fleet, session))

    until(lambda: compared() >= 6, "copies were answered and counted")
    assert served_by == {"v1"}
    shown = fleet.get("/admin/rollout")["rollout"]
    assert shown["requests"]["v1"] == shown["requests"]["v2"], "each beside the request that it is a copy of"
    assert {each["name"]: each["estimate"] for each in shown["judgements"]}["errors"] == 0
    assert "as a shadow" in fleet.dualmap("rollout", "--url", fleet.endpoint)
    fleet.dualmap("rollout", "--url", fleet.endpoint, "rollback")
    assert fleet.get("/admin/revisions")["shadow"] is None


def streamed(fleet: Fleet, session: int) -> str:
    """The revision that answers a greedy request by a stream."""
    messages = [{"role": "user", "content": f"copied question {session}: " + "word " * 300}]
    options = {"max_tokens": 8, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"model": fleet.model, "messages": messages, **options}).encode()
    asked = urllib.request.Request(f"{fleet.endpoint}/v1/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
        return str(fleet.instances()[answer.headers["x-dualmap-instance"]]["revision"])


def known_everywhere(fleet: Fleet) -> None:
    """Wait until every replica has the weights as they are."""
    with redis.Redis.from_url(fleet.store_url, decode_responses=True) as store:
        leases = store.hgetall("dualmap:{default}:replicas")
    urls = [json.loads(text)["info"]["ops_url"] for text in leases.values()]

    def says(url: str) -> bool:
        with urllib.request.urlopen(f"{url}/admin/revisions", timeout=60) as answer:
            found = json.loads(answer.read())
        return bool(found["version"] == found["applied_version"])

    until(lambda: all(map(says, urls)), "every replica knows the weights")
