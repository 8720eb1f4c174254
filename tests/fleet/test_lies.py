"""One instance of four looks healthy and lies: clients hardly notice, and it soon gets hardly anything."""

from __future__ import annotations

import http.client
import itertools
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.fleet.fleet_process import Fleet, running_fleet, until

REQUESTS, CLIENTS = 160, 12
NUMBERS = itertools.count(10)
"""Numbers of prompts, which no cache knows, and of instances."""
FIRST = 60
"""Requests in which a liar may be found out."""

AT_ONCE = ["redirect", "unauthorized", "not_found", "busy", "empty", "page", "error_200"]
AFTER_A_TOKEN = ["broken", "error_event", "truncated", "abort"]


@pytest.fixture(scope="module")
def lying_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    options = ("--replicas", "1", "--workers", "1", "--instances", "4", "--worker.health_interval_s", "0.3")
    with running_fleet(tmp_path_factory.mktemp("lies"), options) as fleet:
        yield fleet


@pytest.fixture
def members(lying_fleet: Fleet) -> Iterator[list[str]]:
    """Four honest instances, of which the replica has judged none: others are members in place of those that lied."""
    for name in avoided(lying_fleet):
        replace(lying_fleet, name)
    yield until(lambda: len(found := ready(lying_fleet)) == 4 and sorted(found), "all are ready")
    for name in lying_fleet.instances():
        lying_fleet.emulator(name, "/emulator/lie", {"lie": None})
    lying_fleet.until_idle()


@pytest.fixture
def liar(members: list[str]) -> str:
    return members[1]


def replace(fleet: Fleet, name: str) -> None:
    """Make the server behind an instance another member, of which nothing is known."""
    member = fleet.instances()[name]
    request = urllib.request.Request(f"{fleet.endpoint}/admin/instances/{name}", method="DELETE")
    urllib.request.urlopen(request, timeout=60).close()
    rate = {"prefill_tokens_per_s": member["prefill_tokens_per_s"]}
    fleet.post("/admin/instances", {"id": f"instance-{next(NUMBERS)}", "url": member["url"], **rate})


def ready(fleet: Fleet) -> list[str]:
    return [name for name, each in fleet.instances().items() if each["state"] == "ready"]


def ask(fleet: Fleet, number: int, *, stream: bool) -> tuple[str, bool]:
    """Where the request was answered, and whether that was a whole answer."""
    url = urlsplit(fleet.endpoint)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
    prompt = f"{number:05d} words of its own " * 8
    body = {"model": fleet.model, "prompt": prompt, "max_tokens": 12, "stream": stream}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        instance_id = answer.headers.get("x-dualmap-instance", "")
        content = answer.read()
    except (OSError, http.client.HTTPException):
        return instance_id if "instance_id" in locals() else "", False
    finally:
        connection.close()
    ends = b"data: [DONE]" if stream else b'"finish_reason":"length"'
    failed = b'"error"' in content or b'"abort"' in content
    return instance_id, answer.status == 200 and ends in content and not failed


def traffic(fleet: Fleet, *, stream: bool, count: int = REQUESTS) -> list[tuple[str, bool]]:
    with ThreadPoolExecutor(CLIENTS) as clients:
        numbers = itertools.islice(NUMBERS, count)
        return list(clients.map(lambda number: ask(fleet, number, stream=stream), numbers))


def avoided(fleet: Fleet) -> dict[str, Any]:
    """The members that the replica avoids; it may still avoid some that are none any more."""
    found: dict[str, Any] = fleet.get("/health")["pools"]["default"]["avoided"]
    members = fleet.instances()
    return {name: each for name, each in found.items() if name in members}


def shares(answers: list[tuple[str, bool]], *liars: str) -> tuple[int, float]:
    """How many requests failed for their clients, and the liars' share of those after the first."""
    late = [instance_id for instance_id, _ in answers[FIRST:]]
    return sum(not whole for _, whole in answers), sum(name in liars for name in late) / len(late)


@pytest.mark.parametrize(("lie", "stream"), [*((lie, True) for lie in AT_ONCE), ("empty", False), ("page", False)])
def test_a_lie_before_the_first_byte_costs_no_client_anything(
    lying_fleet: Fleet, liar: str, lie: str, stream: bool
) -> None:
    lying_fleet.emulator(liar, "/emulator/lie", {"lie": lie, "retry_after": "30" if lie == "busy" else None})

    failed, share = shares(traffic(lying_fleet, stream=stream), liar)

    assert failed == 0
    assert share == 0
    found = avoided(lying_fleet)[liar]
    assert found["state"] == ("busy" if lie == "busy" else "open")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lie", AFTER_A_TOKEN)
def test_a_lie_after_the_first_token_is_told_to_few(lying_fleet: Fleet, liar: str, lie: str, stream: bool) -> None:
    lying_fleet.emulator(liar, "/emulator/lie", {"lie": lie})

    failed, share = shares(traffic(lying_fleet, stream=stream), liar)

    # Whole answers go to another instance. Of streams, those fail that are under way when the liar is found out.
    assert failed <= (CLIENTS + 8 if stream else 0)
    assert share <= 0.03
    assert liar in avoided(lying_fleet)


@pytest.mark.parametrize("lie", ["not_found", "truncated"])
def test_an_instance_that_lies_now_and_then_is_avoided_too(lying_fleet: Fleet, liar: str, lie: str) -> None:
    lying_fleet.emulator(liar, "/emulator/lie", {"lie": lie, "every": 3})

    failed, share = shares(traffic(lying_fleet, stream=True), liar)

    assert failed <= (CLIENTS + 8 if lie == "truncated" else 0)
    assert share <= 0.10
    assert liar in avoided(lying_fleet)


def test_two_busy_instances_of_four_cost_nobody_anything(lying_fleet: Fleet, members: list[str]) -> None:
    busy = members[1:3]
    for name in busy:
        lying_fleet.emulator(name, "/emulator/lie", {"lie": "busy", "retry_after": "30"})

    failed, share = shares(traffic(lying_fleet, stream=False), *busy)

    assert (failed, share) == (0, 0)


def test_what_all_instances_say_is_the_answer_and_judges_nobody(lying_fleet: Fleet, members: list[str]) -> None:
    for name in members:
        lying_fleet.emulator(name, "/emulator/lie", {"lie": "not_found"})

    answers = traffic(lying_fleet, stream=False, count=40)

    assert all(instance_id and not whole for instance_id, whole in answers)
    assert not avoided(lying_fleet)


def test_an_instance_that_is_honest_again_gets_requests_again(lying_fleet: Fleet, liar: str) -> None:
    lying_fleet.emulator(liar, "/emulator/lie", {"lie": "truncated"})
    traffic(lying_fleet, stream=True, count=FIRST)
    assert liar in avoided(lying_fleet)

    lying_fleet.emulator(liar, "/emulator/lie", {"lie": None})

    def is_back() -> bool:
        return all(whole for _, whole in traffic(lying_fleet, stream=True, count=24)) and not avoided(lying_fleet)

    until(is_back, "trial requests have brought it back")
