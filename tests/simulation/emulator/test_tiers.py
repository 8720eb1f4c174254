"""An emulated server with tiers behind its device: what it loads, reports and publishes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import msgpack  # type: ignore[import-untyped]
import pytest
import zmq.asyncio

from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from tests.support.ports import free_port

BLOCK_TOKENS = 16
TEXT = "".join(f"word {number} " for number in range(60))
"""Seven whole blocks."""
BLOCKS = (len(TEXT) // 4 - 1) // BLOCK_TOKENS


@pytest.fixture
async def emulator() -> AsyncIterator[EmulatedInstance]:
    settings = EmulatorSettings(
        preset="qwen2.5-7b-910b4-tp1:host_kv_tokens=320+disk_kv_tokens=16000+disk_gb_per_s=2",
        port=free_port(10, 20), kv_events_port_offset=10, block_tokens=BLOCK_TOKENS,
        kv_capacity_tokens=BLOCK_TOKENS * 9, max_num_batched_tokens=512, max_num_seqs=8, time_scale=100.0,
    )  # fmt: skip
    async with emulated_instances(settings) as (instance,):
        yield instance


async def complete(http: httpx.AsyncClient, prompt: str, **fields: object) -> int:
    """The cached tokens that the emulator reports."""
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    answer = await http.post("/v1/completions", json={"model": model, "prompt": prompt, "max_tokens": 4, **fields})
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    """Counters of tiers by name and last label."""
    page = (await http.get("/metrics")).text
    found = re.findall(r'^vllm:(?:kv_offload_|prompt_tokens_cached_by_)(\w+?)_total\{.*?(\w+)"\} (\S+)$', page, re.M)
    return {f"{name} {label}": float(number) for name, label, number in found}


async def test_what_the_device_evicted_is_loaded_and_counted_by_its_tier(
    http: httpx.AsyncClient, emulator: EmulatedInstance
) -> None:
    assert await complete(http, TEXT) == 0
    await complete(http, TEXT.upper())  # takes its place on the device
    assert await complete(http, TEXT) == BLOCKS * BLOCK_TOKENS
    found = await counters(http)

    device, host = found["source device"], found["source host"]
    assert device + host == BLOCKS * BLOCK_TOKENS
    assert found["load_bytes 7b"] == 57_344 * host > 0
    config = emulator.generator.config
    price = config.kept_tiers[0].price(config.transfer.bytes_per_token)
    assert found["load_time 7b"] == pytest.approx(price.load_s(int(host)) / 100)


async def test_what_host_memory_forgot_is_read_from_disk(http: httpx.AsyncClient) -> None:
    for number in range(4):
        await complete(http, f"{number}{TEXT[1:]}")
    assert await complete(http, f"0{TEXT[1:]}") == BLOCKS * BLOCK_TOKENS
    found = await counters(http)

    assert found["source disk"] > 0
    assert found["tiering_read_bytes fs"] == 57_344 * found["source disk"]
    assert found["tiering_read_time fs"] > 57_344 * found["source disk"] / 2e9 / 100


@pytest.mark.parametrize(("most", "loads"), [(0, False), (None, True), (-1, True), ("all", True), (False, True)])
async def test_a_request_can_forbid_loads_and_what_is_no_number_forbids_none(
    http: httpx.AsyncClient, most: object, loads: bool
) -> None:
    await complete(http, TEXT)
    await complete(http, TEXT.upper())
    cached = await complete(http, TEXT, kv_transfer_params={"max_load_tokens": most})

    assert (cached == BLOCKS * BLOCK_TOKENS) is loads
    assert ((await counters(http))["source host"] > 0) is loads


async def test_events_name_the_medium_of_what_a_tier_keeps_and_forgets(
    http: httpx.AsyncClient, emulator: EmulatedInstance
) -> None:
    [publisher] = emulator.kv_events
    for number in range(4):
        await complete(http, f"{number}{TEXT[1:]}")
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint)
        await socket.send_multipart((b"", (0).to_bytes(8, "big")))
        events: list[dict[str, object]] = []
        while int.from_bytes((frames := await socket.recv_multipart())[-2], "big", signed=True) >= 0:
            events += msgpack.unpackb(frames[-1])[1]
    finally:
        context.destroy(linger=0)
    kinds = {(event["type"], event["medium"], event.get("locality")) for event in events}

    assert kinds == {
        ("BlockStored", "GPU", None), ("BlockRemoved", "GPU", None),
        ("BlockStored", "CPU", None), ("BlockRemoved", "CPU", None),
        ("BlockStored", "STORAGE", "LOCAL"),
    }  # fmt: skip
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert all(len(event["token_ids"]) == BLOCK_TOKENS * len(event["block_hashes"]) for event in stored)
    behind = [event for event in stored if event["medium"] != "GPU"]
    assert all((len(event["block_hashes"]), event["extra_keys"]) == (1, None) for event in behind)


async def test_a_server_without_tiers_reports_none(http: httpx.AsyncClient) -> None:
    settings = EmulatorSettings(port=0, time_scale=1000.0)
    async with (
        emulated_instances(settings) as (instance,),
        httpx.AsyncClient(base_url=instance.url, verify=False) as client,
    ):
        assert "kv_offload" not in (await client.get("/metrics")).text
