"""What the emulator publishes of a hybrid model: a subscriber knows by it what each prompt will find."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import httpx
import zmq.asyncio

from dualmap.scheduling.prompts.cache_groups import last_end
from dualmap.scheduling.prompts.engine_blocks import TOKEN_BYTES, engine_chain
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.workers.kv_events.decoding import Event, Stored
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.sockets import EventSockets
from tests.support.ports import free_port

BLOCK_TOKENS = 16


def shape_of(event: Event) -> str:
    if not isinstance(event, Stored):
        return "other"
    named, filled = len(event.names), len(event.token_bytes) // TOKEN_BYTES // event.block_tokens
    return "dense" if named == filled else "sparse" if named else "empty"


async def cached_tokens(http: httpx.AsyncClient, model: str, ids: list[int]) -> int:
    answer = await http.post("/v1/completions", json={"model": model, "prompt": ids, "max_tokens": 2})
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_each_hit_is_known_before_by_the_events() -> None:
    rng = Random(5)
    settings = EmulatorSettings(
        port=free_port(10, 20), kv_events_port_offset=10, block_tokens=BLOCK_TOKENS, time_scale=1000.0,
        kv_capacity_tokens=BLOCK_TOKENS * 90, max_num_batched_tokens=100, max_num_seqs=8,
        cache_groups=("window:50", "window:70:32", "state:32"),
    )  # fmt: skip
    view, ends, inner = EngineView(), set[int](), set[int]()
    shapes: Counter[str] = Counter()
    prompts: list[list[int]] = [[]]
    hits = 0
    async with emulated_instances(settings) as (instance,), httpx.AsyncClient(base_url=instance.url) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        (publisher,) = instance.kv_events
        context = zmq.asyncio.Context()
        sockets = EventSockets(context, publisher.endpoint, publisher.replay_endpoint, "kv@")
        read = 0
        for _ in range(60):
            begin = rng.choice(prompts[-8:])
            ids = begin[: rng.randrange(len(begin) + 1)] if rng.random() < 0.5 else begin
            ids = [*ids[:400], *(rng.randrange(3000) for _ in range(rng.randrange(20, 200)))]
            hashes = engine_chain(ids, BLOCK_TOKENS).hashes
            listed = [True if block in inner else False if block in ends else None for block in hashes]
            most = (len(ids) - 1) // BLOCK_TOKENS
            expected = min(most, last_end(listed, most)) * BLOCK_TOKENS

            cached = await cached_tokens(http, model, ids)

            assert cached == expected
            hits += cached > 0
            prompts.append(ids)
            await asyncio.sleep(0)
            async for batch in sockets.replay(read):
                view.apply(batch)
                shapes.update(map(shape_of, batch.events))
                read = batch.sequence + 1
            change, _ = view.take_change(0, 0.0)
            ends = (ends - {*change.removed, *change.inner}) | {*change.stored}
            inner = (inner - {*change.removed, *change.stored}) | {*change.inner}
        sockets.close()
        context.destroy(linger=0)

    assert hits > 15
    assert {"other", "dense", "sparse", "empty"} <= shapes.keys()
    assert change.hit_step_tokens == 32
