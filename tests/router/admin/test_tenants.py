"""Tenants over ``/admin``: made, changed, listed, removed, and who did it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from dualmap.router.replica.runtime import Runtime
from dualmap.router.settings import AdminSettings
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.tenants.allotment_ledger import LedgerEntry

ADMINS = (
    AdminSettings(name="ada", key=SecretStr("ada-secret")),
    AdminSettings(name="bob", sha256=hashlib.sha256(b"bob-secret").hexdigest(), role="reader"),
)


def as_admin(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-secret"}


def asked(runtime: Runtime, key: str) -> Caller | None:
    return runtime.tenants.caller({b"x-api-key": key.encode()}.get)


async def made(client: httpx.AsyncClient, name: str = "acme", **fields: Any) -> dict[str, Any]:
    answer = await client.post("/admin/tenants", json={"name": name, **fields})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_tenant_is_made_with_keys_that_are_shown_once(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime()
    client = client_of(runtime)
    answer = await made(
        client, keys=[{"name": "ci", "limits": {"requests_in_flight": 2}}], limits={"requests_per_minute": 60}, weight=3
    )

    (key,) = answer["keys"]
    caller = asked(runtime, key["key"])
    assert caller is not None
    assert (caller.tenant.name, caller.key, caller.tenant.weight) == ("acme", "ci", 3.0)
    assert {limit.of for limit in caller.tenant.limits} == {"", "key:ci"}
    shown = (await client.get("/admin/tenants/acme")).json()
    assert shown["limits"] == {"requests_per_minute": 60}
    assert [(each["name"], each["limits"]) for each in shown["keys"]] == [("ci", {"requests_in_flight": 2})]
    digest = hashlib.sha256(key["key"].encode()).hexdigest()
    for page in ("/admin/tenants", "/admin/tenants/acme", "/admin/audit"):
        text = (await client.get(page)).text
        assert "acme" in text and key["key"] not in text and digest not in text


async def test_limits_change_one_by_one_and_the_log_has_from_and_to(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime())
    await made(
        client, limits={"requests_per_minute": 60, "tokens_per_day": 9}, model_limits={"m": {"tokens_per_day": 4}}
    )
    answer = await client.patch(
        "/admin/tenants/acme",
        json={"limits": {"requests_per_minute": 6, "tokens_per_day": None}, "model_limits": {"m": None}},
        headers={"x-dualmap-by": "ada@laptop"},
    )

    assert (answer.json()["limits"], answer.json()["model_limits"]) == ({"requests_per_minute": 6}, {})
    changed, created = (await client.get("/admin/audit")).json()
    assert (created["action"], created["by"]) == ("create", "127.0.0.1")
    assert (changed["action"], changed["by"]) == ("set", "ada@laptop (unverified) from 127.0.0.1")
    assert changed["before"] == {
        "limits": {"requests_per_minute": 60, "tokens_per_day": 9}, "model_limits": {"m": {"tokens_per_day": 4}},
    }  # fmt: skip
    assert changed["after"] == {"limits": {"requests_per_minute": 6}, "model_limits": {}}
    assert await client.patch("/admin/tenants/acme", json={"limits": {"requests_per_minute": 6}})
    assert len((await client.get("/admin/audit")).json()) == 2, "what changes nothing is not entered"


async def test_keys_are_made_rotated_and_revoked(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime()
    client = client_of(runtime)
    await made(client)
    first = (await client.post("/admin/tenants/acme/keys", json={"name": "ci"})).json()["key"]
    second = (await client.post("/admin/tenants/acme/keys/ci/rotate", json={"keep_old_s": 60})).json()["key"]
    assert first != second
    assert asked(runtime, first) is not None and asked(runtime, second) is not None
    third = (await client.post("/admin/tenants/acme/keys/ci/rotate", json={})).json()["key"]
    assert asked(runtime, third) is not None
    for former in (first, second):
        with pytest.raises(Exception, match="valid API key"):
            asked(runtime, former)
    assert (await client.delete("/admin/tenants/acme/keys/ci")).status_code == 204
    with pytest.raises(Exception, match="valid API key"):
        asked(runtime, third)
    assert (await client.delete("/admin/tenants/acme/keys/ci")).status_code == 404
    actions = [each["action"] for each in (await client.get("/admin/audit?tenant=acme")).json()]
    assert actions == ["revoke key", "rotate key", "rotate key", "create key", "create"]


async def test_a_key_may_come_as_its_hash_and_the_same_call_again_changes_nothing(
    start_runtime: Any, client_of: Any
) -> None:
    runtime = await start_runtime()
    client, digest = client_of(runtime), hashlib.sha256(b"my-own-secret").hexdigest()
    await made(client)
    await made(client, "other")
    for _ in range(2):
        answer = await client.post("/admin/tenants/acme/keys", json={"name": "ci", "sha256": digest})
        assert (answer.status_code, answer.json()["key"]) == (201, None)
    assert asked(runtime, "my-own-secret") is not None
    assert (await client.post("/admin/tenants/other/keys", json={"name": "x", "sha256": digest})).status_code == 409
    assert len((await client.get("/admin/audit")).json()) == 3


async def test_two_administrators_who_change_one_tenant_lose_nothing(start_runtime: Any, client_of: Any) -> None:
    one, other = client_of(await start_runtime()), client_of(await start_runtime())
    await made(one)
    names = ("requests_per_minute", "tokens_per_minute", "requests_per_day", "tokens_per_day", "tokens_in_flight")
    changes = zip(names, (one, other) * 3, strict=False)
    await asyncio.gather(*(each.patch("/admin/tenants/acme", json={"limits": {name: 7}}) for name, each in changes))

    shown = (await other.get("/admin/tenants/acme")).json()
    assert shown["limits"] == dict.fromkeys(names, 7)
    late = await one.patch("/admin/tenants/acme", json={"weight": 2, "revision": shown["revision"] - 1})
    assert late.status_code == 409 and "look at it again" in late.json()["error"]["message"]
    assert (
        await one.patch("/admin/tenants/acme", json={"weight": 2, "revision": shown["revision"]})
    ).status_code == 200


async def test_tenants_of_the_settings_are_shown_and_changed_in_the_file_alone(
    start_runtime: Any, client_of: Any
) -> None:
    settings = TenantSettings(name="old", keys=(TenantKeySettings(name="ci", key=SecretStr("old-secret")),))
    client = client_of(await start_runtime(tenants=(settings,)))
    shown = (await client.get("/admin/tenants/old")).json()
    assert (shown["source"], shown["revision"], shown["keys"]) == ("settings", None, [{"name": "ci", "limits": {}}])
    assert "old-secret" not in str(shown)
    for refused in (
        await client.post("/admin/tenants", json={"name": "old"}),
        await client.patch("/admin/tenants/old", json={"weight": 2}),
        await client.delete("/admin/tenants/old"),
        await client.post("/admin/tenants/old/keys", json={"name": "x"}),
    ):
        assert refused.status_code == 409
        assert "settings file: change it there" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": "a b"}, "name"),
        ({"name": "../etc"}, "name"),
        ({"name": "ä"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a", "weight": 0}, "weight"),
        ({"name": "a", "weight": "inf"}, "weight"),
        ({"name": "a", "limits": {"requests_per_minute": 0}}, "requests_per_minute"),
        ({"name": "a", "limits": {"requests_per_hour": 1}}, "requests_per_hour"),
        ({"name": "a", "pools": ["none"]}, "there is no pool 'none'"),
        ({"name": "a", "keys": [{"name": "k"}, {"name": "k"}]}, "two of its keys"),
        ({"name": "a", "keys": [{"name": "k", "sha256": "abc"}]}, "sha256"),
        ({"name": "a", "key": "x"}, "key"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    start_runtime: Any, client_of: Any, fields: dict[str, Any], named: str
) -> None:
    client = client_of(await start_runtime())
    answer = await client.post("/admin/tenants", json=fields)

    assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert (await client.get("/admin/tenants")).json() == {"tenants": [], "next": None}


async def test_wrong_changes_are_refused_by_name(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime())
    await made(client)
    for changes, named in (
        ({"limits": {"requests_per_minute": -1}}, "requests_per_minute"),
        ({"limits": {"speed": 1}}, "speed"),
        ({"weight": 0}, "weight"),
        ({"priority_class": "a b"}, "priority_class"),
        ({"draws": "all"}, "draws"),
        ({"pools": ["none"]}, "none"),
    ):
        answer = await client.patch("/admin/tenants/acme", json=changes)
        assert answer.status_code == 400 and named in answer.json()["error"]["message"]
    assert (await client.patch("/admin/tenants/nobody", json={"weight": 2})).status_code == 404
    assert (await client.get("/admin/tenants/nobody")).status_code == 404


async def test_the_list_is_read_in_parts(start_runtime: Any, client_of: Any) -> None:
    client = client_of(await start_runtime())
    for name in ("b", "a", "c"):
        await made(client, name)
    first = (await client.get("/admin/tenants?limit=2")).json()
    rest = (await client.get(f"/admin/tenants?limit=2&after={first['next']}")).json()

    assert [each["name"] for each in (*first["tenants"], *rest["tenants"])] == ["a", "b", "c"]
    assert rest["next"] is None


async def test_administrators_are_named_and_a_reader_changes_nothing(start_runtime: Any, client_of: Any) -> None:
    slip = AdminSettings(name="slip", sha256=hashlib.sha256(b"").hexdigest())
    runtime = await start_runtime(admins=(*ADMINS, slip))
    ada, bob = (client_of(runtime, headers=as_admin(name)) for name in ("ada", "bob"))
    await made(ada)
    assert (await bob.get("/admin/tenants/acme")).status_code == 200
    assert (await bob.get("/admin/audit")).json()[0]["by"] == "ada"
    for refused in (
        await bob.delete("/admin/tenants/acme"),
        await bob.post("/admin/tenants", json={"name": "mine"}),
        await bob.patch("/admin/settings", json={"changes": {"max_hold_s": 3}}),
        await bob.post("/sleep"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "read_only")
    for key in ("", "wrong-secret", hashlib.sha256(b"bob-secret").hexdigest()):
        stranger = client_of(runtime, headers={"authorization": f"Bearer {key}"})
        assert (await stranger.get("/admin/tenants")).status_code == 401
    await ada.patch("/admin/settings", json={"changes": {"max_hold_s": 3}, "by": "somebody else"})
    assert (await bob.get("/admin/settings/history")).json()[0]["by"] == "ada"


async def test_no_key_is_logged(start_runtime: Any, client_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    runtime = await start_runtime(admins=ADMINS)
    client = client_of(runtime, headers=as_admin("ada"))
    with caplog.at_level(logging.DEBUG):
        (key,) = (await made(client, keys=[{"name": "ci"}]))["keys"]
        await client.post("/admin/tenants/acme/keys/ci/rotate", json={})

    digest = hashlib.sha256(key["key"].encode()).hexdigest()
    assert key["key"] not in caplog.text and digest not in caplog.text and "ada-secret" not in caplog.text


async def test_how_a_limit_was_divided_is_forgotten_with_it(start_runtime: Any, client_of: Any, store: Any) -> None:
    client = client_of(await start_runtime())
    for name in ("acme", "other"):
        await made(client, name, limits={"requests_per_minute": 60, "tokens_per_day": 9})
        for budget in ("requests/minute", "tokens/day"):
            await store.allotments.enter(f"{name}/{budget}", LedgerEntry(), LedgerEntry(1, 60, {"a": 60}))

    await client.patch("/admin/tenants/acme", json={"limits": {"tokens_per_day": None}})
    assert (await store.allotments.scan(0))[1].keys() == {
        "acme/requests/minute", "other/requests/minute", "other/tokens/day"
    }  # fmt: skip
    await client.delete("/admin/tenants/other")

    assert (await store.allotments.scan(0))[1].keys() == {"acme/requests/minute"}
