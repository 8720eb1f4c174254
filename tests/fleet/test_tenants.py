"""Tenants of a real fleet: keys, limits over all replicas, and what a replica that dies leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest
import redis
from openai import OpenAI

from dualmap.cli.main import main
from dualmap.scheduling.tenants.budgets import KINDS
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.codec import budgets_from
from tests.fleet.browser import chromium
from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

TENANTS = [
    {"name": "acme", "keys": [{"name": "ci", "key": "acme-secret"}], "limits": {"requests_per_day": 40}},
    {"name": "other", "keys": [{"name": "web", "key": "other-secret"}], "limits": {"tokens_per_minute": 100}},
    {
        "name": "slow",
        "keys": [{"name": "web", "key": "slow-secret"}],
        "limits": {"requests_in_flight": 6, "tokens_per_month": 1_000_000},
    },
    {"name": "next", "keys": [{"name": "web", "key": "next-secret"}]},
]
OPTIONS = (
    *(*QUICK, "--replicas", "3", "--workers", "1", "--tenants", json.dumps(TENANTS)),
    *("--router.revoked_requests", "end", "--router.tenant_cache_secret", "a-secret-of-the-fleet"),
)


async def ask(fleet: Fleet, count: int, *, key: str = "acme-secret", prompt: str = "hello") -> list[httpx.Response]:
    """So many requests at once, each over a connection of its own, so that all replicas get some."""

    async def one(number: int) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"model": fleet.model, "prompt": f"{prompt} {number}", "max_tokens": 1}
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"{fleet.endpoint}/v1/completions", json=body, headers=headers)

    return await asyncio.gather(*[one(number) for number in range(count)])


def budgets(fleet: Fleet) -> Mapping[str, int]:
    """The amount that is used of each budget, where something is."""
    with redis.Redis.from_url(fleet.store_url) as store:
        found: dict[bytes, bytes] = store.hgetall(PoolKeys("dualmap", "default").books)
    return {
        f"{book.decode()}/{KINDS[kind]}": round(used)
        for book, text in found.items()
        for kind, (used, _) in budgets_from(text).items()
        if used
    }


def usage_of(fleet: Fleet, tenant: str) -> Mapping[str, int]:
    """What was metered of a tenant."""
    rows = httpx.get(f"{fleet.endpoint}/admin/usage", params={"by": "tenant", "tenant": tenant}).json()["rows"]
    return rows[0] if rows else {}


@pytest.fixture(scope="module")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("tenants")
    with running_fleet(directory, (*OPTIONS, "--router.batches.storage", str(directory / "files"))) as fleet:
        yield fleet


def test_a_quota_holds_over_all_replicas_to_the_request(
    shared_fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = shared_fleet
    answers = asyncio.run(ask(fleet, 60))

    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(admitted), len(refused)) == (40, 20)
    assert refused[0].json()["error"]["code"] == "insufficient_quota"

    tokens = sum(answer.json()["usage"]["prompt_tokens"] for answer in admitted)
    until(lambda: usage_of(fleet, "acme")["requests"] == 40, "all that was admitted is metered")
    metered = usage_of(fleet, "acme")
    assert (metered["prompt_tokens"], metered["output_tokens"], metered["refused"]) == (tokens, 40, 20)
    assert main(["usage", "--url", fleet.endpoint, "--by", "tenant,key", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(f"acme,ci,40,{tokens},")
    assert main(["usage", "--url", fleet.endpoint, "--records"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({line["request_id"] for line in lines if line["outcome"] == "completed"}) == len(lines) == 40

    assert asyncio.run(ask(fleet, 1, key="wrong-secret"))[0].status_code == 401
    (too_long,) = asyncio.run(ask(fleet, 1, key="other-secret", prompt="word " * 400))
    assert too_long.status_code == 429
    assert "shorten it" in too_long.json()["error"]["message"]
    assert asyncio.run(cached_of_a_prompt(fleet)) == ["slow", "next"]

    (short,) = asyncio.run(ask(fleet, 1, key="other-secret"))
    assert short.headers["x-ratelimit-limit-tokens"] == "100"

    the_page_shows_tenants(fleet)


def replica_urls(fleet: Fleet) -> list[str]:
    """The addresses of single replicas."""
    with redis.Redis.from_url(fleet.store_url, decode_responses=True) as store:
        leases: dict[str, str] = store.hgetall("dualmap:{default}:replicas")
    return [json.loads(text)["info"]["ops_url"] for text in leases.values()]


def statuses(fleet: Fleet, urls: Sequence[str], key: str) -> list[int]:
    """What each replica answers a request with this key, over a connection of its own."""
    body = {"model": fleet.model, "prompt": "hello", "max_tokens": 1}
    headers = {"x-api-key": key}
    return [httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code for url in urls]


def key_in(output: str) -> str:
    """The key that a command shows once."""
    found = re.search(r"shown this once: (\S+)", output)
    assert found is not None, output
    return found[1]


async def end_of_a_revoked_stream(fleet: Fleet, key: str) -> str:
    """The code of the error that ends a long answer whose key is revoked within it."""
    body = {"model": fleet.model, "prompt": "tell", "max_tokens": 5000, "stream": True}
    last, revoking = "", None
    async with httpx.AsyncClient(timeout=60) as client:
        answer = client.stream("POST", f"{fleet.endpoint}/v1/completions", json=body, headers={"x-api-key": key})
        with contextlib.suppress(httpx.RemoteProtocolError):  # the body ends without its end, as it is not whole
            async with answer as got:
                assert got.status_code == 200
                async for line in got.aiter_lines():
                    last = line if line.startswith("data: {") else last
                    if revoking is None:
                        revoked = ("tenants", "revoke", "new", "ci", "--url", fleet.endpoint)
                        revoking = asyncio.create_task(asyncio.to_thread(fleet.dualmap, *revoked))
    assert revoking is not None
    await revoking
    return str(json.loads(last[6:]).get("error", {}).get("code"))


def test_keys_that_are_made_rotated_and_revoked_count_on_every_replica_within_a_second(shared_fleet: Fleet) -> None:
    fleet = shared_fleet
    urls, endpoint = replica_urls(fleet), ("--url", fleet.endpoint)
    assert len(urls) == 3

    def soon(key: str, status: int) -> None:
        until(lambda: statuses(fleet, urls, key) == [status] * 3, f"every replica answers {status}")

    first = key_in(fleet.dualmap("tenants", "create", "new", "requests_per_minute=60", "--key", "ci", *endpoint))
    soon(first, 200)
    second = key_in(fleet.dualmap("tenants", "rotate", "new", "ci", *endpoint))
    soon(first, 401)
    soon(second, 200)
    assert asyncio.run(end_of_a_revoked_stream(fleet, second)) == "invalid_api_key"
    second = key_in(fleet.dualmap("tenants", "add-key", "new", "ci", *endpoint))
    soon(second, 200)
    assert "requests_in_flight: 3" in fleet.dualmap("tenants", "set", "new", "requests_in_flight=3", *endpoint)
    fleet.dualmap("tenants", "revoke", "new", "ci", *endpoint)
    soon(second, 401)

    assert "new" in fleet.dualmap("tenants", "list", *endpoint)
    audit = json.loads(fleet.dualmap("tenants", "audit", "new", "--json", *endpoint))
    actions = [each["action"] for each in audit]
    assert actions == ["revoke key", "set", "create key", "revoke key", "rotate key", "create"]
    assert "@" in audit[0]["by"]
    kept = [*fleet.directory.glob("*.log"), *fleet.directory.glob("*.out")]
    assert kept and not any(key in path.read_text() for path in kept for key in (first, second))
    with redis.Redis.from_url(fleet.store_url) as store:
        stored = b"".join(store.dump(name) for name in store.scan_iter("dualmap:{fleet}:*"))
    assert first.encode() not in stored and second.encode() not in stored

    kept_key = key_in(fleet.dualmap("tenants", "create", "kept", "--key", "ci", *endpoint))
    soon(kept_key, 200)
    with redis.Redis.from_url(fleet.store_url) as store:
        store.delete(*store.scan_iter("dualmap:{fleet}:*"))
        until(lambda: store.hexists("dualmap:{fleet}:tenants", "kept"), "a replica puts back what the store lost")
    assert statuses(fleet, urls, kept_key) == [200] * 3
    assert statuses(fleet, urls, second) == [401] * 3


def the_page_shows_tenants(fleet: Fleet) -> None:
    """Skips the rest of a test where no browser is installed."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{fleet.endpoint}/ui")
        page.wait_for_selector("#tenants:not([hidden])", timeout=30_000)
        row = page.locator("#tenants tbody tr", has_text="acme")
        until(lambda: "requests per day 100%" in row.inner_text(), "the quota that is spent is shown")
        assert row.locator("td").nth(5).inner_text() == "20"


async def cached_of_a_prompt(fleet: Fleet) -> list[str]:
    """Two tenants send one prompt, each twice; the one found it in a cache that sent it the second time."""
    found = []
    for tenant in ("slow", "next", "slow", "next"):
        (answer,) = await ask(fleet, 1, key=f"{tenant}-secret", prompt="one and the same " * 200)
        usage = answer.json()["usage"]
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        assert (cached > 0) == (int(answer.headers["x-dualmap-cached-tokens"]) > 0), "the fleet's own books agree"
        if cached:
            found.append(tenant)
    return found


async def killed_in_mid_answer(fleet: Fleet) -> list[int | None]:
    """Start as many streams as the tenant may, kill a replica, and see the other streams to their end; the tokens that
    the instance of each counted, None for one that broke with its replica."""

    async def stream(number: int, started: asyncio.Event) -> int | None:
        body = {
            "model": fleet.model, "prompt": f"tell {number}", "max_tokens": 1000,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        counted = 0
        headers = {"authorization": "Bearer slow-secret"}
        async with httpx.AsyncClient(timeout=60) as client:
            try:
                async with client.stream("POST", f"{fleet.endpoint}/v1/completions", json=body, headers=headers) as got:
                    assert got.status_code == 200
                    async for line in got.aiter_lines():
                        started.set()
                        if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                            counted = usage["total_tokens"]
            except httpx.HTTPError:
                return None
        return counted

    events = [asyncio.Event() for _ in range(6)]
    streams = [asyncio.create_task(stream(number, event)) for number, event in enumerate(events)]
    await asyncio.gather(*[event.wait() for event in events])
    (refused,) = await ask(fleet, 1, key="slow-secret")
    assert refused.status_code == 429
    assert "6 requests at a time" in refused.json()["error"]["message"]
    fleet.kill("router-1")
    return await asyncio.gather(*streams)


def test_what_a_dead_replica_drew_comes_back_and_what_was_answered_stays(tmp_path: Path) -> None:
    slowly = ("--time-scale", "4")  # all streams begin before the first one ends, however slow this machine is
    with running_fleet(tmp_path, (*OPTIONS, *slowly)) as fleet:
        ended = asyncio.run(killed_in_mid_answer(fleet))
        counted = sum(tokens or 0 for tokens in ended)

        until(lambda: "slow/requests/in_flight" not in budgets(fleet), "nothing is in flight any more")
        used = sum(tokens for name, tokens in budgets(fleet).items() if name == "slow/tokens/month")
        assert used == counted > 0
        until(lambda: usage_of(fleet, "slow")["requests"] == 6, "all that was admitted is metered")
        metered = usage_of(fleet, "slow")
        answered = metered["prompt_tokens"] + metered["output_tokens"]
        assert (metered["lost"] > 0) == (None in ended), "lost are those that went by the replica that was killed"
        assert answered >= counted, "of these no answer is counted"


def test_a_key_that_is_revoked_ends_the_batches_that_it_made(shared_fleet: Fleet) -> None:
    fleet, endpoint = shared_fleet, ("--url", shared_fleet.endpoint)
    made = key_in(fleet.dualmap("tenants", "create", "batcher", "--key", "ci", *endpoint))
    other = key_in(fleet.dualmap("tenants", "add-key", "batcher", "web", *endpoint))
    body = {"model": fleet.model, "prompt": "line", "max_tokens": 100, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number in range(3000)
    ]
    base_url = f"{fleet.endpoint}/v1"
    until(lambda: statuses(fleet, replica_urls(fleet), made) == [200] * 3, "the key is known")
    with OpenAI(base_url=base_url, api_key=made) as first, OpenAI(base_url=base_url, api_key=other) as second:
        file = first.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = first.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: (second.batches.retrieve(batch.id).request_counts or batch).completed > 0, "some are answered")

        fleet.dualmap("tenants", "revoke", "batcher", "ci", *endpoint)

        until(lambda: second.batches.retrieve(batch.id).status == "completed", "the batch is over")
        over = second.batches.retrieve(batch.id)
        errors = [json.loads(line) for line in second.files.content(over.error_file_id or "").text.splitlines()]
    assert over.request_counts is not None
    assert over.request_counts.completed < 3000
    assert len(errors) == over.request_counts.failed
    assert {each["response"]["status_code"] for each in errors} == {401}
