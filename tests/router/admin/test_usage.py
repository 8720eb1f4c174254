"""What tenants used, for operators and for themselves."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from pydantic import SecretStr

from dualmap.router.errors import QuotaSpentError, RouterError
from dualmap.router.replica.runtime import Runtime
from dualmap.runtime.tenant_settings import LimitSettings, TenantKeySettings, TenantSettings
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.pool.usage import USAGE_DAYS, UsageBooks
from tests.router import tools

TENANTS = tuple(
    TenantSettings(
        name=name,
        keys=(
            TenantKeySettings(
                name="ci", key=SecretStr(f"{name}-secret"), limits=LimitSettings(requests_in_flight=4)
            ),
            TenantKeySettings(name="web", key=SecretStr(f"{name}-web-secret")),
        ),
        limits=LimitSettings(tokens_per_month=1000),
    )
    for name in ("acme", "other")
)  # fmt: skip


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap-least-cost", queue_order="deadline")


@pytest.fixture
async def runtime(start_runtime: Any) -> Runtime:
    found: Runtime = await start_runtime(instances=(tools.spec("a"),), tenants=TENANTS, admin_key="the-admin-key")
    return found


async def use(runtime: Runtime, tenant: str, key: str = "ci", request_id: str = "r", output: int = 5) -> None:
    """One request that is answered."""
    request = tools.request("hello", request_id=request_id)
    settings = next(each for each in TENANTS if each.name == tenant)
    request.caller = Caller(settings.tenant(), key)
    live = await runtime.intake.place(request)
    live.sent()
    live.first_token()
    live.finish(Outcome.COMPLETED, Usage(20, 16, output))
    await runtime.pools.pools["default"].outbox.flush()


ADMIN = {"authorization": "Bearer the-admin-key"}


async def test_usage_is_added_up_as_it_is_asked_for(runtime: Runtime, client_of: Any) -> None:
    for number, (tenant, key) in enumerate((("acme", "ci"), ("acme", "web"), ("other", "ci"))):
        await use(runtime, tenant, key, f"r{number}")
    client = client_of(runtime, headers=ADMIN)

    by_tenant = (await client.get("/admin/usage?by=tenant")).json()
    by_key = (await client.get("/admin/usage?by=tenant,key,model&tenant=acme")).json()["rows"]

    assert [(row["tenant"], row["requests"], row["prompt_tokens"]) for row in by_tenant["rows"]] == [
        ("acme", 2, 40),
        ("other", 1, 20),
    ]
    assert [(row["key"], row["output_tokens"], row["cached_tokens"]) for row in by_key] == [
        ("ci", 5, 16),
        ("web", 5, 16),
    ]
    assert (await client.get(f"/admin/usage?last={by_tenant['first']}")).json()["rows"] == []
    for wrong in ("by=colour", "by=", "first=2027-01-01&last=2026-01-01", "first=yesterday", "last=0001-01-01"):
        assert (await client.get(f"/admin/usage?{wrong}")).status_code in (400, 422), wrong


async def test_of_a_long_time_only_the_days_that_are_kept_are_read(
    runtime: Runtime, client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await use(runtime, "acme")
    read: list[date] = []
    of_day = UsageBooks.of_day

    async def counted(books: UsageBooks, day: date) -> Any:
        read.append(day)
        return await of_day(books, day)

    monkeypatch.setattr(UsageBooks, "of_day", counted)
    client = client_of(runtime, headers=ADMIN)
    today = date.fromisoformat((await client.get("/admin/usage")).json()["last"])
    read.clear()
    asked = f"first={today - timedelta(390)}&last={today + timedelta(9)}"
    answer = (await client.get(f"/admin/usage?{asked}")).json()

    assert [row["requests"] for row in answer["rows"]] == [1]
    assert (min(read), max(read), len(read)) == (today - timedelta(USAGE_DAYS - 1), today, USAGE_DAYS)
    read.clear()
    assert (await client.get("/admin/usage?first=9999-12-01&last=9999-12-31")).json()["rows"] == []
    assert read == []


async def test_a_request_that_is_refused_after_a_failed_try_counts_once(runtime: Runtime, client_of: Any) -> None:
    request = tools.request("hello", request_id="r")
    request.caller = Caller(TENANTS[0].tenant(), "ci")
    live = await runtime.intake.place(request)
    live.sent()

    with pytest.raises(RouterError):
        await live.failed(Failed(InstanceFailure(FailureKind.CLOSED, "it closed the connection")))
    live.finish(Outcome.CLIENT_GONE)
    await runtime.pools.pools["default"].outbox.flush()

    (row,) = (await client_of(runtime, headers=ADMIN).get("/admin/usage?by=tenant")).json()["rows"]
    assert (row["tenant"], row["requests"], row["unanswered"], row["prompt_tokens"]) == ("acme", 1, 1, 0)
    assert await runtime.pools.pools["default"].store.requests_of(runtime.context.replica_id) == []


async def test_single_requests_are_read_page_by_page(runtime: Runtime, client_of: Any) -> None:
    for number in range(3):
        await use(runtime, "acme", request_id=f"r{number}")
    client = client_of(runtime, headers=ADMIN)

    first = (await client.get("/admin/usage/records?limit=2")).json()
    rest = (await client.get(f"/admin/usage/records?after={first['next']}")).json()
    none = (await client.get(f"/admin/usage/records?after={rest['next']}")).json()

    assert [each["request_id"] for each in (*first["records"], *rest["records"])] == ["r0", "r1", "r2"]
    assert first["records"][0] | {"entry": "", "ended_ms": 0} == {
        "entry": "", "ended_ms": 0, "request_id": "r0", "tenant": "acme", "key": "ci", "class": "", "model": "default",
        "prompt_tokens": 20, "cached_tokens": 16, "output_tokens": 5, "outcome": "completed", "reported": True,
    }  # fmt: skip
    assert (none["records"], none["next"]) == ([], rest["next"])


async def test_a_key_reads_its_own_usage_and_limits_and_nothing_else(runtime: Runtime, client_of: Any) -> None:
    for number, (tenant, key) in enumerate((("acme", "ci"), ("acme", "web"), ("other", "ci"))):
        await use(runtime, tenant, key, f"r{number}")
    client = client_of(runtime, headers={"x-api-key": "acme-secret"})

    own = (await client.get("/v1/usage")).json()

    assert (own["tenant"], own["key"]) == ("acme", "ci")
    assert [(row["model"], row["requests"], row["output_tokens"]) for row in own["usage"]] == [("default", 1, 5)]
    limits = {(each["limit"], each["of"]): each for each in own["limits"]}
    assert limits["tokens_per_month", ""] | {"used": 50, "remaining": 950} == limits["tokens_per_month", ""]
    assert limits["requests_in_flight", "key:ci"]["used"] == 0
    assert "other" not in str(own) and "web" not in str(own) and "secret" not in str(own)
    for path in ("/admin/usage", "/admin/usage/records", "/admin/requests"):
        assert (await client.get(path)).status_code == 401


async def test_a_request_that_a_limit_refused_is_explained(runtime: Runtime, client_of: Any) -> None:
    await use(runtime, "acme", output=900)
    request = tools.request("word " * 200, request_id="long")
    request.caller = Caller(TENANTS[0].tenant(), "ci")
    with pytest.raises(QuotaSpentError):
        await runtime.intake.place(request)

    found = (await client_of(runtime, headers=ADMIN).get("/admin/explain/long")).json()

    assert (found["tenant"], found["key"], found["outcome"]) == ("acme", "ci", "refused")
    spent, in_flight = found["limits"]
    assert "80 of 1,000 tokens a month were left" in spent and spent.endswith(": too few")
    assert "4 of 4 requests at a time for key ci were left" in in_flight


async def test_live_requests_are_listed_by_tenant(runtime: Runtime, client_of: Any) -> None:
    request = tools.request("hello", request_id="live")
    request.caller = Caller(TENANTS[0].tenant(), "ci")
    await runtime.intake.place(request)
    client = client_of(runtime, headers=ADMIN)

    assert [each["request_id"] for each in (await client.get("/admin/requests?tenant=acme")).json()] == ["live"]
    assert (await client.get("/admin/requests?tenant=other")).json() == []


async def test_tenants_are_shown_as_they_are_now(runtime: Runtime, client_of: Any) -> None:
    await use(runtime, "acme", request_id="over")
    request = tools.request("hello", request_id="live")
    request.caller = Caller(TENANTS[1].tenant(), "ci")
    await runtime.intake.place(request)

    acme, other = (await client_of(runtime, headers=ADMIN).get("/admin/usage/now")).json()

    assert (acme["tenant"], acme["today"]["requests"], acme["running"]) == ("acme", 1, 0)
    assert ["tokens_per_month", "", 0.025] in acme["limits"]
    assert [each["work"]["share"] for each in (acme, other)] == [0.5, 0.5]
    assert acme["work"]["part"] + other["work"]["part"] == pytest.approx(1.0, rel=0.01)
    assert (other["tenant"], other["today"]["requests"], other["running"]) == ("other", 0, 1)
    assert ["requests_in_flight", "key:ci", 0.25] in other["limits"]


async def test_metrics_have_a_bounded_number_of_tenants(start_runtime: Any, client_of: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),), tenants=TENANTS, tenant_metrics=1)
    for number, tenant in enumerate(("acme", "other", "other")):
        await use(runtime, tenant, request_id=f"r{number}")

    page = (await client_of(runtime).get("/metrics")).text

    assert 'dualmap_tenant_requests_total{outcome="completed",tenant="acme"} 1.0' in page
    assert 'dualmap_tenant_requests_total{outcome="completed",tenant="_other"} 2.0' in page
    assert 'dualmap_tenant_tokens_total{kind="cached",tenant="_other"} 32.0' in page
    month = 'dualmap_tenant_limit_used_ratio{limit="tokens_per_month",of="",pool="default",tenant="acme"}'
    assert f"{month} 0.025" in page


async def test_usage_needs_the_key_of_a_tenant(runtime: Runtime, start_runtime: Any, client_of: Any) -> None:
    assert (await client_of(runtime).get("/v1/usage")).status_code == 401
    assert (await client_of(runtime, headers={"x-api-key": "wrong"}).get("/v1/usage")).status_code == 401
    open_to_all = await start_runtime()
    assert (await client_of(open_to_all).get("/v1/usage")).status_code == 404
