"""KV events: frames, payload, replay, and that they name the blocks that the fleet computes of a prompt."""

from __future__ import annotations

import asyncio
import os
import uuid
from random import Random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from dualmap.scheduling.prompts.engine_blocks import BlockExtras, engine_chain
from dualmap.workers.kv_events.decoding import Stored, read_batch
from dualmap.workers.kv_events.engine_view import EngineView
from tests.conformance.event_frames import BLOCK_TOKENS, Events
from tests.conformance.server import Server

COMPLETIONS = "/v1/completions"


@pytest.fixture
def prompt() -> list[int]:
    """Three full blocks, and a bit of a fourth one, that no run before had."""
    return Random(uuid.uuid4().int).sample(range(300, 3000), 3 * BLOCK_TOKENS + 4)


async def test_a_batch_has_topic_sequence_and_payload(server: Server, events: Events) -> None:
    chance, frames = Random(uuid.uuid4().int), None
    async with asyncio.timeout(30):
        while frames is None:  # a publisher does not tell when a subscription has arrived
            await server.post(COMPLETIONS, prompt=chance.sample(range(300, 3000), 40), max_tokens=1)
            frames = await events.next(0.5)

    topic, sequence, payload = frames
    published_s, batch, rank = msgpack.unpackb(payload)
    assert topic.startswith(b"kv@") and len(sequence) == 8
    assert published_s > 1e9 and rank in (0, None)
    assert {event["type"] for event in batch} <= {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert read_batch(int.from_bytes(sequence, "big"), payload).published_s == published_s


async def test_stored_blocks_have_their_tokens_and_follow_each_other(
    server: Server, events: Events, prompt: list[int]
) -> None:
    await server.post(COMPLETIONS, prompt=prompt[: 2 * BLOCK_TOKENS + 3], max_tokens=1)
    first = await events.stored(prompt[: 2 * BLOCK_TOKENS])
    await server.post(COMPLETIONS, prompt=prompt, max_tokens=1)
    stored = await events.stored(prompt)

    assert stored[: len(first)] == first
    assert [token for event in stored for token in event["token_ids"]] == prompt[: 3 * BLOCK_TOKENS]
    names = [name for event in stored for name in event["block_hashes"]]
    assert len(set(names)) == 3
    assert [event["parent_block_hash"] for event in stored] == [
        names[names.index(event["block_hashes"][0]) - 1] if place else None for place, event in enumerate(stored)
    ]
    assert {event["block_size"] for event in stored} == {BLOCK_TOKENS}
    assert {event["lora_name"] for event in stored} == {None} and not any(any(e["extra_keys"] or ()) for e in stored)


@pytest.mark.parametrize("salt", [None, "a secret"])
async def test_events_and_prompts_come_to_the_same_blocks(
    server: Server, events: Events, prompt: list[int], salt: str | None
) -> None:
    fields = {} if salt is None else {"cache_salt": salt}
    await server.post(COMPLETIONS, prompt=prompt, max_tokens=1, **fields)
    await events.stored(prompt)

    view, read = EngineView(), []
    for frames in (await events.replay(0))[:-1]:
        batch = read_batch(int.from_bytes(frames[-2], "big"), frames[-1])
        read += [event for event in batch.events if isinstance(event, Stored)]
        view.apply(batch)
    change, _ = view.take_change(0, 0.0)

    expected = engine_chain(prompt, BLOCK_TOKENS, BlockExtras.of(None, salt)).hashes
    assert set(expected) <= set(change.stored)
    assert all(event.tier is None and event.translatable for event in read) and view.orphans == 0


async def test_an_adapters_blocks_are_its_own_and_those_of_its_path(
    server: Server, events: Events, prompt: list[int]
) -> None:
    """Another path under the same name is another adapter to the engine, and the same one in events."""
    paths = os.environ.get("DUALMAP_VLLM_LORA_PATHS", "").split(":") if server.real else ["/adapters/1", "/adapters/2"]
    if len(paths) < 2:
        pytest.skip("DUALMAP_VLLM_LORA_PATHS names no two adapters that the server can load")
    name, cached = f"a-{uuid.uuid4().hex[:8]}", []
    view = EngineView()
    for path in paths[:2]:
        loaded = await server.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})
        assert loaded.status_code == 200, loaded.text
        for _ in range(2):
            answer = await server.post(COMPLETIONS, prompt=prompt, max_tokens=1, model=name, cache_salt="a secret")
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert (await server.http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200
    assert cached == [0, 3 * BLOCK_TOKENS] * 2

    stored: list[dict[str, Any]] = []
    async with asyncio.timeout(20):
        while sum(len(each["block_hashes"]) for each in stored) < 6:
            every = (await events.replay(0))[:-1]
            found = [event for frames in every for event in msgpack.unpackb(frames[-1])[1]]
            stored = [each for each in found if each.get("lora_name") == name]
    for frames in every:
        view.apply(read_batch(int.from_bytes(frames[-2], "big"), frames[-1]))
    change, _ = view.take_change(0, 0.0)

    extra_keys = [keys for each in stored for keys in each["extra_keys"]]
    assert extra_keys == [[name, "a secret"], [name], [name]] * 2
    numbers = [each["lora_id"] for each in stored]
    assert numbers[0] < numbers[-1]
    assert len({block for each in stored for block in each["block_hashes"]}) == 6
    expected = engine_chain(prompt, BLOCK_TOKENS, BlockExtras.of(name, "a secret")).hashes
    assert [change.stored.count(block) for block in expected] == [1, 1, 1]


async def test_a_replay_has_every_batch_from_a_sequence_on(server: Server, events: Events, prompt: list[int]) -> None:
    for end in (40, 70, 99):
        await server.post(COMPLETIONS, prompt=prompt[:end], max_tokens=1)
    await events.stored(prompt)

    every = await events.replay(0)
    some = await events.replay(2)
    sequences = [int.from_bytes(frames[-2], "big") for frames in every[:-1]]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) and len(sequences) >= 3
    assert [frames[-2:] for frames in some] == [f[-2:] for f in every if int.from_bytes(f[-2], "big") >= 2]
    assert {len(frames) for frames in every} <= {3, 4} and all(frames[0] == b"" for frames in every)
    assert every[-1][-1] == b""


async def test_a_cleared_cache_is_published(server: Server, events: Events, prompt: list[int]) -> None:
    await server.post(COMPLETIONS, prompt=prompt[:70], max_tokens=1)
    await events.stored(prompt[:64])
    before = len(await events.replay(0))
    cleared = await server.http.post("/reset_prefix_cache")
    if server.real and cleared.status_code == 404:
        pytest.skip("the server has no /reset_prefix_cache: VLLM_SERVER_DEV_MODE=1")
    assert cleared.status_code == 200
    await server.http.get("/metrics")
    assert len(await events.replay(0)) == before, "nothing is published before the engine computes again"
    await server.post(COMPLETIONS, prompt=prompt, max_tokens=1)  # events leave with the engine's next step
    await events.stored(prompt)

    every = [event for frames in (await events.replay(0))[:-1] for event in msgpack.unpackb(frames[-1])[1]]
    kinds = [event["type"] for event in every]
    last_cleared = len(kinds) - 1 - kinds[::-1].index("AllBlocksCleared")
    after = [token for event in every[last_cleared + 1 :] for token in event.get("token_ids", ())]
    assert after == prompt[: 3 * BLOCK_TOKENS]
