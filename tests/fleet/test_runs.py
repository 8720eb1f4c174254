"""Agents' runs that wait for memory, on a real fleet of two routers, of which one is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fleet.browser import chromium
from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

OPTIONS = (
    *(*QUICK, "--instances", "1", "--replicas", "2", "--workers", "1", "--time-scale", "4"),
    *("--scheduling.admit_runs", "true", "--preset", "qwen2.5-7b-910b4:kv_capacity_tokens=4000"),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("runs"), OPTIONS) as fleet:
        yield fleet


async def turn(fleet: Fleet, run: str, tokens: int) -> int:
    """The status of a turn of a run, over a connection of its own, so by any replica."""
    async with httpx.AsyncClient(timeout=120) as client:
        body = {"model": fleet.model, "prompt": f"{run} " * (4 * tokens // (len(run) + 1)), "max_tokens": 2}
        headers = {"x-claude-code-session-id": run}
        return (await client.post(f"{fleet.endpoint}/v1/completions", json=body, headers=headers)).status_code


def runs(fleet: Fleet) -> dict[str, Any]:
    return dict(fleet.get("/admin/runs"))


def states(fleet: Fleet) -> list[str]:
    return sorted(each["state"] for each in runs(fleet)["runs"])


def test_a_run_without_memory_waits_and_survives_the_death_of_a_router(fleet: Fleet) -> None:
    async def scenario() -> None:
        assert await turn(fleet, "first-run", 3000) == 200
        assert states(fleet) == ["at a tool"]
        other = [asyncio.create_task(turn(fleet, f"other-run-{number}", 500)) for number in range(6)]
        await asyncio.to_thread(until, lambda: states(fleet).count("parked") == 6, "six runs wait")
        shown = json.loads(fleet.dualmap("runs", "--url", fleet.endpoint, "--json"))
        assert shown["memory"]["waiting_turns"] == 6
        parked = json.loads(fleet.dualmap("runs", "--url", fleet.endpoint, "--state", "parked", "--json"))["runs"]
        assert len(parked) == 6, "and the run at a tool is left out"
        assert "run" in fleet.dualmap("runs", "--url", fleet.endpoint, "--state", "parked")

        fleet.kill("router-1")
        answers = await asyncio.gather(*other, return_exceptions=True)

        served = [each for each in answers if each == 200]
        assert len(served) + sum(isinstance(each, httpx.TransportError) for each in answers) == 6
        assert served, "of those of the router that lives, at least"
        assert await turn(fleet, "first-run", 3100) == 200

    asyncio.run(scenario())
    until(lambda: runs(fleet)["memory"]["waiting_turns"] == 0, "no turn of the dead router waits")
    until(lambda: all(each["turns_in_flight"] == 0 for each in runs(fleet)["runs"]), "none is in flight")
    found = {each["turns"] for each in runs(fleet)["runs"]}
    assert 2 in found, "the first run is the same as before"
    fleet.until_idle()


def test_responses_that_continue_one_are_turns_of_one_run(fleet: Fleet) -> None:
    before = {each["run"] for each in runs(fleet)["runs"]}
    first = None
    for number in range(3):
        body = {"model": fleet.model, "input": f"and then {number}?", "max_output_tokens": 4}
        body |= {} if first is None else {"previous_response_id": first}
        answer = httpx.post(f"{fleet.endpoint}/v1/responses", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        first = first or answer.json()["id"]
    new = [each for each in runs(fleet)["runs"] if each["run"] not in before]
    assert [each["turns"] for each in new] == [2], "the first one names the run of those that continue it"


def test_the_page_shows_where_the_time_of_a_run_went(fleet: Fleet) -> None:
    asyncio.run(turn(fleet, "seen-run", 500))
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{fleet.endpoint}/ui")
        shown = page.locator("#runs tbody tr").first
        shown.wait_for()
        assert "at a tool" in shown.inner_text()
        assert "to the first token" in str(page.locator("#runs .parts").first.get_attribute("title"))
        page.close()
    explained = fleet.dualmap("runs", "--url", fleet.endpoint, "seen-run")
    assert "where its agents' time went" in explained, "by the name that its client sends"
