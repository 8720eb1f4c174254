"""Emulated servers that pull KV from each other's caches, and what becomes of a pull whose source fails."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dualmap.simulation.emulator import peer_pulls
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from tests.support.ports import free_port

BLOCK_TOKENS = 16
TEXT = "".join(f"word {number} " for number in range(600))
BLOCKS = (len(TEXT) // 4 - 1) // BLOCK_TOKENS


@asynccontextmanager
async def servers(**fields: Any) -> AsyncIterator[tuple[EmulatedInstance, EmulatedInstance]]:
    settings = EmulatorSettings(
        preset="qwen2.5-7b-910b4", port=free_port(1), instances=2, block_tokens=BLOCK_TOKENS, peer_pulls=True, **fields
    )
    async with emulated_instances(settings) as (source, target):
        yield source, target


def source_of(instance: EmulatedInstance, **fields: Any) -> dict[str, Any]:
    url = httpx.URL(instance.url)
    return {"remote_kv_source": {"kv_request_id": "r", "remote_host": url.host, "remote_port": url.port, **fields}}


async def complete(instance: EmulatedInstance, source: dict[str, Any] | None = None) -> httpx.Response:
    body: dict[str, Any] = {"model": "qwen2.5-7b", "prompt": TEXT, "max_tokens": 2}
    if source is not None:
        body["kv_transfer_params"] = source
    async with httpx.AsyncClient(base_url=instance.url, timeout=60) as http:
        return await http.post("/v1/completions", json=body)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def order(instance: EmulatedInstance, fault: str) -> None:
    async with httpx.AsyncClient(base_url=instance.url) as http:
        (await http.post(f"/emulator/peer/{fault}", json={"count": 1})).raise_for_status()


async def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def is_pulling(instance: EmulatedInstance) -> bool:
    return instance.generator.engine.statistics().pulling > 0


def has_served(instance: EmulatedInstance) -> bool:
    pulls = instance.generator.peer_pulls
    assert pulls is not None
    return pulls.served > 0


async def test_a_prompt_is_pulled_from_the_server_that_has_it_and_counted() -> None:
    async with servers() as (source, target):
        assert cached(await complete(source)) == 0
        assert cached(await complete(target, source_of(source))) == BLOCKS * BLOCK_TOKENS
        async with httpx.AsyncClient(base_url=target.url) as http:
            page = (await http.get("/metrics")).text

    found = dict(re.findall(r'^vllm:(\w+)_total\{.*"p2p"\} (\S+)$', page, re.M))
    assert float(found["prompt_tokens_cached_by_source"]) == BLOCKS * BLOCK_TOKENS
    assert float(found["kv_offload_tiering_read_bytes"]) == BLOCKS * BLOCK_TOKENS * 57_344
    assert 0 < float(found["kv_offload_tiering_read_time"]) < 1


@pytest.mark.parametrize("fault", ["refuse", "nothing there", "no port", "incomplete"])
async def test_a_source_without_the_blocks_is_a_miss(fault: str) -> None:
    async with servers() as (source, target):
        named = source_of(source)
        if fault != "nothing there":
            await complete(source)
        if fault == "refuse":
            await order(source, "refuse")
        elif fault == "no port":
            named = source_of(source, remote_port=free_port(1))
        elif fault == "incomplete":
            named = source_of(source, kv_request_id="")
        assert cached(await complete(target, named)) == 0


async def test_a_source_of_another_layout_is_a_miss() -> None:
    async with servers() as (source, _), servers(kv_capacity_tokens=320_000) as (_, other):
        await complete(source)
        other.generator.peer_pulls._block_tokens = 32
        assert cached(await complete(other, source_of(source))) == 0


async def killed(source: EmulatedInstance) -> None:
    source.die(abruptly=True, revive_after_s=None)


async def restarted(source: EmulatedInstance) -> None:
    source.generator.kill()
    source.generator.restart()


@pytest.mark.parametrize("ends", [killed, restarted])
@pytest.mark.parametrize(("policy", "status"), [("fail", 500), ("recompute", 200)])
async def test_a_source_that_dies_during_the_pull_is_a_failure_to_load(
    ends: Callable[[EmulatedInstance], Awaitable[None]], policy: str, status: int
) -> None:
    # given a pull that takes a second
    slow = {"transfer": {"latency_ms": 1000}}
    async with servers(kv_load_failure_policy=policy, **slow) as (source, target):
        await complete(source)
        answering = asyncio.create_task(complete(target, source_of(source)))
        await until(lambda: has_served(source))
        await ends(source)
        answer = await answering

        assert answer.status_code == status
        if status == 200:
            assert cached(answer) == 0
        assert target.generator.engine.kv_used_tokens == 0


async def test_a_source_that_is_silent_fails_the_pull_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pulls, "LOOK_TIMEOUT_S", 0.3)
    async with servers() as (source, target):
        await complete(source)
        await order(source, "stall")
        answer = await complete(target, source_of(source))

        assert answer.status_code == 500
        assert "KV load failure" in answer.text


async def test_a_client_that_leaves_during_the_pull_leaves_nothing() -> None:
    async with servers(transfer={"latency_ms": 60_000}) as (source, target):
        await complete(source)
        answering = asyncio.create_task(complete(target, source_of(source)))
        await until(lambda: has_served(source) and is_pulling(target))
        answering.cancel()
        await until(lambda: not is_pulling(target))

        assert target.generator.engine.kv_used_tokens == 0


async def test_pulls_from_one_source_follow_each_other() -> None:
    # given a source and a link on which the prompt takes half a second
    tokens_per_s = BLOCKS * BLOCK_TOKENS / 0.5
    async with servers(transfer={"gb_per_s": 57_344 * tokens_per_s / 1e9, "latency_ms": 0}) as (source, target):
        await complete(source)
        started_s = time.monotonic()
        source.generator.peer_pulls._occupy(BLOCKS * BLOCK_TOKENS)
        await complete(target, source_of(source))
        assert time.monotonic() - started_s >= 1.0


async def test_a_server_tells_where_it_serves_pulls_and_what_a_failure_does() -> None:
    async with (
        servers(kv_load_failure_policy="recompute") as (source, _),
        httpx.AsyncClient(base_url=source.url) as http,
    ):
        config = (await http.get("/server_info?config_format=json")).json()["vllm_config"]
    (place,) = config["kv_transfer_config"]["kv_connector_extra_config"]["secondary_tiers"]

    assert (place["type"], place["port"]) == ("p2p", httpx.URL(source.url).port)
    assert config["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"


async def test_servers_that_do_not_pull_ignore_a_source() -> None:
    settings = EmulatorSettings(preset="qwen2.5-7b-910b4", port=free_port(1), instances=2, block_tokens=BLOCK_TOKENS)
    async with emulated_instances(settings) as (source, target):
        await complete(source)
        assert cached(await complete(target, source_of(source))) == 0
        async with httpx.AsyncClient(base_url=source.url) as http:
            assert (await http.get("/server_info")).status_code == 404
