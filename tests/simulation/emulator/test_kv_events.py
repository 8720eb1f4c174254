"""What the emulator publishes of its cache, and how a subscriber and a prompt understand it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator

import httpx
import pytest
import zmq.asyncio

from dualmap.scheduling.prompts.engine_blocks import BlockExtras, Medium, engine_chain
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.simulation.workload.tokenizer import encode
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.sockets import EventSockets
from tests.support.images import png_url
from tests.support.ports import free_port

BLOCK_TOKENS = 16
TEXT = "".join(f"word {number} " for number in range(60))


@pytest.fixture
async def emulator() -> AsyncIterator[EmulatedInstance]:
    settings = EmulatorSettings(
        port=free_port(10, 20), kv_events_port_offset=10, block_tokens=BLOCK_TOKENS,
        kv_capacity_tokens=BLOCK_TOKENS * 24, max_num_batched_tokens=512, max_num_seqs=8, time_scale=1000.0,
        scale_out=True,
    )  # fmt: skip
    async with emulated_instances(settings) as (instance,):
        yield instance


class Reader:
    """Follows an emulator from its first event."""

    def __init__(self, emulator: EmulatedInstance) -> None:
        [publisher] = emulator.kv_events
        self.context = zmq.asyncio.Context()
        self.sockets = EventSockets(self.context, publisher.endpoint, publisher.replay_endpoint, "kv@")
        self.view = EngineView()
        self.held: set[int] = set()

    async def read_all(self) -> set[int]:
        """What the engine holds, by a replay of all that it published."""
        async for batch in self.sockets.replay(0):
            self.view.apply(batch)
        change, cleared = self.view.take_change(0, 0.0)
        self.held = (set() if cleared else self.held) - set(change.removed) | set(change.stored)
        self.view = EngineView()
        return self.held

    def close(self) -> None:
        self.sockets.close()
        self.context.destroy(linger=0)


@pytest.fixture
async def reader(emulator: EmulatedInstance) -> AsyncIterator[Reader]:
    reader = Reader(emulator)
    yield reader
    reader.close()


async def complete(http: httpx.AsyncClient, prompt: str, **fields: object) -> int:
    """The cached tokens that the emulator reports."""
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, **fields}
    answer = await http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def chain_of(text: str, salt: str | None = None) -> tuple[int, ...]:
    ids = array("I", encode(text.encode())[: len(text) // 4])
    return tuple(engine_chain(ids, BLOCK_TOKENS, BlockExtras.of(None, salt)).hashes)


@pytest.mark.parametrize("salt", [None, "a secret"])
async def test_events_and_prompts_come_to_the_same_blocks(
    http: httpx.AsyncClient, reader: Reader, salt: str | None
) -> None:
    fields = {} if salt is None else {"cache_salt": salt}
    await complete(http, TEXT, **fields)

    assert await reader.read_all() == set(chain_of(TEXT, salt))


async def test_blocks_with_images_have_the_keys_by_which_vllm_tells_them_apart(
    http: httpx.AsyncClient, reader: Reader
) -> None:
    model = (await http.get("/v1/models")).json()["data"][0]["id"]
    parts = [
        {"type": "text", "text": TEXT[:80]},
        {"type": "image_url", "image_url": {"url": png_url(28 * BLOCK_TOKENS, 56)}},
    ]
    body = {"model": model, "messages": [{"role": "user", "content": parts}], "cache_salt": "s", "max_tokens": 1}
    rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.json()["usage"]["prompt_tokens"] == len(rendered["token_ids"])

    features, size = rendered["features"], BLOCK_TOKENS
    (identifier,), (place,) = features["mm_hashes"]["image"], features["mm_placeholders"]["image"]
    assert place["length"] == 2 * size
    extras = BlockExtras.of_media([Medium(identifier, place["offset"], place["length"])], size, None, "s")
    ids = [token & 0xFFFFFFFF for token in rendered["token_ids"]]
    full = engine_chain(ids, size, extras).hashes
    assert await reader.read_all() == set(full[: len(ids) // size])


async def test_evictions_are_published(http: httpx.AsyncClient, reader: Reader) -> None:
    await complete(http, TEXT)
    before = await reader.read_all()
    other = TEXT.upper() + TEXT
    await complete(http, other)
    after = await reader.read_all()
    cached = await complete(http, TEXT)

    kept = [block in after for block in chain_of(TEXT)]
    assert before == set(chain_of(TEXT))
    assert set(chain_of(other)) <= after
    assert kept == sorted(kept, reverse=True)
    assert cached == min(sum(kept), (len(TEXT) // 4 - 1) // BLOCK_TOKENS) * BLOCK_TOKENS


async def test_a_cleared_cache_is_published(http: httpx.AsyncClient, reader: Reader) -> None:
    await complete(http, TEXT)
    (await http.post("/reset_prefix_cache")).raise_for_status()
    await complete(http, TEXT.upper())

    assert await reader.read_all() == set(chain_of(TEXT.upper()))


async def test_an_engine_that_starts_again_counts_from_0(emulator: EmulatedInstance, http: httpx.AsyncClient) -> None:
    await complete(http, TEXT)
    former = list(emulator.kv_events)
    emulator.die(abruptly=True, revive_after_s=0.05)
    async with asyncio.timeout(60):
        while emulator.kv_events in ([], former):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await complete(http, TEXT.upper())
    reader = Reader(emulator)
    try:
        assert await reader.read_all() == set(chain_of(TEXT.upper()))
    finally:
        reader.close()
