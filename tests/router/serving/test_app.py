"""Health, readiness, metrics, models, and the shape of errors."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr

from dualmap.router.http.paths import is_own
from dualmap.router.replica.runtime import Runtime
from dualmap.router.serving.app import create_app
from dualmap.router.settings import RouterSettings
from dualmap.runtime.extras import package_version
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.request.outcome import Outcome
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools


async def test_ready_turns_off_while_draining_and_health_does_not(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client = client_of(runtime)
    assert (await client.get("/ready")).status_code == 200

    runtime.context.draining = True

    assert (await client.get("/ready")).status_code == 503
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "draining")


async def test_a_replica_that_has_not_joined_is_alive_and_not_ready(
    client_of: Any, scheduling: Any, store: Any, clock: Any
) -> None:
    client = client_of(Runtime(RouterSettings(), scheduling, store, [PoolSettings()], clock=clock))

    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).json()["status"] == "starting"


async def test_health_says_when_the_store_is_out_of_reach(start_runtime: Any, client_of: Any, clock: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(
        instances=(tools.spec("a"),), through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0]
    )

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("away")

    tampered[0].before["heartbeat"] = away
    await clock.advance(3.0)
    health = (await client_of(runtime).get("/health")).json()
    assert (health["status"], health["pools"]["default"]["store"]) == ("degraded", "local")

    tampered[0].before.clear()
    await clock.advance(3.0)
    assert (await client_of(runtime).get("/health")).json()["status"] == "ok"


async def test_metrics_are_served_even_while_the_store_is_away(start_runtime: Any, client_of: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0])

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("away")

    tampered[0].before["overview"] = away
    answer = await client_of(runtime).get("/metrics")

    assert answer.status_code == 200
    assert 'dualmap_store_errors_total{call="overview"} 1.0' in answer.text


async def test_models_are_listed_and_one_is_found_by_name(start_runtime: Any, client_of: Any) -> None:
    pools = (PoolSettings(name="one", model="org/base", aliases=("gpt",)), PoolSettings(name="two", model="other"))
    client = client_of(await start_runtime(pools=pools))

    assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == ["org/base", "gpt", "other"]
    assert (await client.get("/v1/models/org/base")).json()["id"] == "org/base"
    missing = await client.get("/v1/models/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("may", "seen"),
    [
        ({}, ["org/base", "gpt", "other"]),
        ({"models": ("gpt", "other")}, ["gpt", "other"]),
        ({"pools": ("one",)}, ["org/base", "gpt"]),
        ({"models": ("gpt", "other"), "pools": ("two",)}, ["other"]),
    ],
)
async def test_a_tenant_sees_the_models_that_it_may_use(
    start_runtime: Any, client_of: Any, may: dict[str, Any], seen: list[str]
) -> None:
    pools = (PoolSettings(name="one", model="org/base", aliases=("gpt",)), PoolSettings(name="two", model="other"))
    acme = TenantSettings(name="acme", keys=(TenantKeySettings(name="ci", key=SecretStr("acme-secret")),), **may)
    client = client_of(await start_runtime(pools=pools, tenants=(acme,), api_keys=("anyone",)))
    key = {"authorization": "Bearer acme-secret"}

    listed = (await client.get("/v1/models", headers=key)).json()
    assert [card["id"] for card in listed["data"]] == seen
    for name in ("org/base", "gpt", "other"):
        found = await client.get(f"/v1/models/{name}", headers=key)
        assert found.status_code == (200 if name in seen else 404), name
        if name not in seen:
            assert found.json()["error"]["code"] == "model_not_found"

    hidden = {"org/base", "gpt", "other"} - {*seen}
    for name in hidden:
        of_hidden = await client.get(f"/v1/models/{name}", headers=key)
        missing = await client.get(f"/v1/models/{'x' * len(name)}", headers=key)
        assert of_hidden.text.replace(name, "x" * len(name)) == missing.text
        assert of_hidden.headers == missing.headers

    everything = await client.get("/v1/models", headers={"authorization": "Bearer anyone"})
    assert len(everything.json()["data"]) == 3
    assert [(await client.get(path)).status_code for path in ("/v1/models", "/v1/models/gpt")] == [401, 401]


async def test_a_replica_answers_what_platforms_ask_of_vllm(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), api_keys=["user"])
    client = client_of(runtime)

    assert (await client.get("/version")).json() == {"version": package_version()}
    assert (await client.get("/health")).json()["version"] == package_version()
    assert (await client.get("/openapi.json")).json()["info"]["version"] == package_version()
    assert (await client.get("/load")).json() == {"server_load": 0}
    placed = await runtime.intake.place(tools.request())
    assert (await client.get("/load")).json() == {"server_load": 1}
    placed.finish(Outcome.COMPLETED)
    assert [(await client.request(method, "/ping")).status_code for method in ("GET", "POST")] == [200, 200]

    runtime.context.draining = True

    assert (await client.get("/ping")).status_code == 503


async def test_keys_guard_models_and_admin_each_their_own(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(api_keys=["user"], admin_key="root"))

    async def status(path: str, key: str | None) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        code: int = (await client.get(path, headers=headers)).status_code
        return code

    assert [await status("/v1/models", key) for key in (None, "wrong", "root", "user")] == [401, 401, 401, 200]
    assert [await status("/admin/instances", key) for key in (None, "user", "root")] == [401, 401, 200]
    assert [await status(path, None) for path in ("/health", "/ready", "/metrics", "/docs")] == [200] * 4
    refused = await client.get("/admin/instances")
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await client.get("/admin/instances", headers={"x-api-key": " root "})).status_code == 200


async def test_a_key_may_have_any_letters_on_this_side_too(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime(api_keys=["schlüssel"], admin_key="ключ"))

    models = await client.get("/v1/models", headers={b"authorization": "Bearer schlüssel".encode()})
    admin = await client.get("/admin/instances", headers={b"x-api-key": "ключ".encode()})

    assert (models.status_code, admin.status_code) == (200, 200)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "router-1.internal"}, True),
        ({"api_keys": ["user"]}, True),
        ({"api_keys": ["user"], "admin_key": "root", "host": "0.0.0.0"}, False),
    ],
)
async def test_an_open_admin_that_others_may_reach_is_warned_of(
    start_runtime: Any, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], warned: bool
) -> None:
    create_app(await start_runtime(**settings))

    assert ("router.admin_key" in caplog.text) is warned


async def test_every_error_has_openais_shape(start_runtime: Any, client_of: Any, store: Any) -> None:
    runtime = await start_runtime()
    client = client_of(runtime)

    nowhere = await client.get("/nowhere")
    wrong_method = await client.put("/admin/instances")
    wrong_body = await client.post("/admin/instances", json={"id": "a b", "url": "ftp://x"})
    wrong_query = await client.get("/admin/requests?limit=0")
    no_pool = await client.get("/admin/queues?pool=none")

    answers = (nowhere, wrong_method, wrong_body, wrong_query, no_pool)
    assert [answer.status_code for answer in answers] == [404, 405, 400, 400, 404]
    for answer in answers:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert wrong_method.headers["allow"] == "GET, HEAD, POST"
    assert (await client.get("/admin/instances/a")).headers["allow"] == "DELETE, PATCH"
    assert (await client.post("/health")).json()["error"]["message"] == "/health takes GET, HEAD"
    load = await client.get("/v1/load_lora_adapter")
    assert load.json()["error"]["message"] == "/v1/load_lora_adapter takes POST"
    assert wrong_body.json()["error"]["param"] == "id"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1/v1/embeddings", "did you mean /v1/embeddings?"),
        ("/openai/v1/models", "did you mean /v1/models?"),
        ("/models", "did you mean /v1/models?"),
        ("/v1/nothing", "see /docs"),
    ],
)
async def test_a_wrong_path_is_answered_with_the_one_that_was_meant(
    start_runtime: Any, client_of: Any, path: str, hint: str
) -> None:
    missing = await client_of(await start_runtime(admin_key="root")).post(path, json={})

    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == f"there is nothing at {path}; {hint}"


@pytest.mark.parametrize(("ui", "place"), [(True, "ui"), (False, "docs")])
async def test_the_root_leads_to_the_live_page(start_runtime: Any, client_of: Any, ui: bool, place: str) -> None:
    answer = await client_of(await start_runtime(ui=ui)).get("/")

    assert (answer.status_code, answer.headers["location"]) == (307, place)


async def test_every_path_of_the_app_is_known_to_the_data_plane_as_the_apps_own(start_runtime: Any) -> None:
    def paths(routes: Any) -> set[str]:
        inner = [route.original_router.routes for route in routes if hasattr(route, "original_router")]
        return {route.path for route in routes if hasattr(route, "path")}.union(*map(paths, inner))

    found = paths(create_app(await start_runtime()).routes)

    assert {"/ui", "/admin/instances", "/v1/models/{model:path}", "/metrics", "/docs"} <= found
    assert [path for path in found if not is_own(path)] == []


NO_OBJECT = "the body must be a JSON object, sent with content-type: application/json"


@pytest.mark.parametrize(
    ("body", "content_type", "message"),
    [
        (b"rubbish", "application/json", "the body is not valid JSON: Expecting value at character 0"),
        (b'{"max_running_requests": 3}', None, NO_OBJECT),
        (b"[]", "application/json", NO_OBJECT),
        (b"", None, NO_OBJECT),
    ],
)
async def test_a_body_that_is_no_object_is_told_so(
    start_runtime: Any, client_of: Any, body: bytes, content_type: str | None, message: str
) -> None:
    client = client_of(await start_runtime())

    headers = {"content-type": content_type} if content_type else {}
    refused = await client.patch("/admin/instances/a", content=body, headers=headers)

    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == message
    assert refused.json()["error"]["param"] is None


async def test_a_bug_is_answered_with_500_that_gives_nothing_away(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime()
    client = client_of(runtime)

    def broken(*_: Any) -> None:
        raise ValueError("a secret")

    runtime.pools.model_cards = broken
    answer = await client.get("/v1/models")

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text


async def test_the_api_describes_itself(start_runtime: Any, client_of: Any) -> None:
    described = (await client_of(await start_runtime()).get("/openapi.json")).json()

    operations = [operation for path in described["paths"].values() for operation in path.values()]
    assert [operation["operationId"] for operation in operations if not operation.get("description")] == []
    assert {"/admin/instances", "/admin/queues", "/admin/ring", "/admin/explain/{request_id}"} <= set(
        described["paths"]
    )


async def test_health_says_that_requests_miss_their_slo_while_they_do(
    start_runtime: Any, client_of: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    client = client_of(runtime)
    waiting = [await runtime.intake.place(tools.request()) for _ in range(12)]
    assert (await client.get("/health")).json()["status"] == "ok"

    clock.jump(5.1)
    health = (await client.get("/health")).json()
    pool = health["pools"]["default"]
    assert (health["status"], pool["overdue"]) == ("late", 12)
    assert pool["last_minute"] == {"arrived": 12, "answered": 0, "on_time": 0, "not_on_time": 12}
    assert pool["problem"].startswith("100 % of requests are not on time: 12 of 12 missed 5 s")

    for each in waiting:
        each.finish(Outcome.CLIENT_GONE)
    await clock.advance(90.0)
    health = (await client.get("/health")).json()
    assert (health["status"], health["pools"]["default"]["problem"]) == ("ok", None)
