"""Weights of revisions and rollouts through the operation API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.router.tools import spec

FLEET = (spec("a", revision="v1"), spec("b", revision="v2"))
ROLLOUT = "/admin/rollout"


@pytest.fixture
async def client(start_runtime: Any, client_of: Any) -> httpx.AsyncClient:
    found: httpx.AsyncClient = client_of(await start_runtime(instances=FLEET))
    return found


async def percents(client: httpx.AsyncClient) -> dict[str, float | None]:
    found = (await client.get("/admin/revisions")).json()
    assert found["version"] == found["applied_version"]
    return {each["revision"]: each["percent"] for each in found["revisions"]}


def error(answer: httpx.Response) -> str:
    assert answer.status_code in (400, 404, 409), answer.text
    return str(answer.json()["error"]["message"])


async def test_weights_are_changed_shown_and_forgotten(client: httpx.AsyncClient) -> None:
    assert await percents(client) == {"v1": None, "v2": None}

    await client.patch("/admin/revisions", json={"weights": {"v1": 95, "v2": 5}})
    assert await percents(client) == {"v1": 95, "v2": 5}
    await client.put("/admin/revisions/tenants", json={"tenant": "acme", "revision": "v2"})
    assert (await client.get("/admin/revisions")).json()["tenants"] == {"acme": "v2"}
    await client.delete("/admin/revisions/v2")
    await client.delete("/admin/revisions/v1")

    assert await percents(client) == {"v1": None, "v2": None}
    said = [each["text"] for each in (await client.get("/admin/revisions/history")).json()]
    assert said == ["v1 forgotten", "v2 forgotten", "tenant acme: v2", "v1 95 %, v2 5 %"]


async def test_what_makes_no_sense_is_refused_and_changes_nothing(client: httpx.AsyncClient) -> None:
    assert "there are: v1, v2" in error(await client.patch("/admin/revisions", json={"weights": {"v9": 100}}))
    assert "more than 100" in error(await client.patch("/admin/revisions", json={"weights": {"v1": 60, "v2": 60}}))
    assert "no weight here" in error(await client.delete("/admin/revisions/v1"))
    tenant = {"tenant": "acme", "revision": "v1"}
    assert "0 will do" in error(await client.put("/admin/revisions/tenants", json=tenant))

    assert await percents(client) == {"v1": None, "v2": None}


async def test_a_rollout_of_the_second_revision_needs_no_weights_before(client: httpx.AsyncClient) -> None:
    assert (await client.get(ROLLOUT)).json()["rollout"] is None

    started = await client.post(ROLLOUT, json={"revision": "v2", "bounds": {"ttft": 1.1, "wrong": 0.02}})

    assert started.status_code == 201, started.text
    rollout = started.json()["rollout"]
    assert (rollout["state"], rollout["percent"], rollout["standing"]) == ("running", 5.0, "open")
    assert {each["name"]: each["bound"] for each in rollout["judgements"]}["wrong"] == 0.02
    assert await percents(client) == {"v1": 95, "v2": 5}
    assert "roll it back first" in error(await client.post(ROLLOUT, json={"revision": "v2"}))


async def test_a_rollout_is_paused_resumed_and_taken_back(client: httpx.AsyncClient) -> None:
    await client.post(ROLLOUT, json={"revision": "v2", "steps": [20, 100]})

    states = [(await client.post(f"{ROLLOUT}/{act}")).json()["rollout"]["state"] for act in ("pause", "resume")]
    back = (await client.post(f"{ROLLOUT}/rollback")).json()["rollout"]

    assert states == ["paused", "running"]
    assert back["state"] == "rolled back"
    assert await percents(client) == {"v1": 100, "v2": 0}
    assert "no rollout is under way" in error(await client.post(f"{ROLLOUT}/pause"))
    assert (await client.post(ROLLOUT, json={"revision": "v2"})).status_code == 201, "another may begin"


async def test_own_events_are_added_up(client: httpx.AsyncClient) -> None:
    events = {"name": "wrong", "revision": "v2", "of": 100, "bad": 3}
    assert "no rollout" in error(await client.post(f"{ROLLOUT}/events", json=events))
    await client.post(ROLLOUT, json={"revision": "v2", "bounds": {"wrong": 0.02}})

    for each in (events, events, {**events, "revision": "v1", "bad": 0}):
        added = await client.post(f"{ROLLOUT}/events", json=each)
        assert added.status_code == 200, added.text

    own = {each["name"]: each for each in added.json()["rollout"]["judgements"]}["wrong"]
    assert own["estimate"] == pytest.approx(0.03)
    assert "of your own; it has: wrong" in error(await client.post(f"{ROLLOUT}/events", json={**events, "name": "x"}))
    assert "more events" in error(await client.post(f"{ROLLOUT}/events", json={**events, "bad": 101}))


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"revision": "v9"}, "there are: v1, v2"),
        ({"revision": "v2", "steps": [50, 5]}, "steps must grow"),
        ({"revision": "v2", "bounds": {"ttft": 0.5}}, "the bound ttft"),
    ],
)
async def test_a_wrong_rollout_is_refused_with_words(client: httpx.AsyncClient, wanted: Any, why: str) -> None:
    assert why in error(await client.post(ROLLOUT, json=wanted))
    assert await percents(client) == {"v1": None, "v2": None}


async def test_with_three_revisions_those_that_serve_are_named_first(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(instances=(*FLEET, spec("c"))))

    assert "give the revisions that serve now" in error(await client.post(ROLLOUT, json={"revision": "v2"}))
    assert "there was no rollout" in error(await client.post(f"{ROLLOUT}/rollback"))
