"""Hybrid models: what each prompt finds is known before by the KV events of the server alone.

With a real vLLM, ``DUALMAP_VLLM_COMMAND=vllm`` starts servers of ``tiny_models`` one after the other. Servers that run
already are named by ``DUALMAP_VLLM_HYBRID_URLS``, with commas between them: hybrid models with KV events, a replay
endpoint and ``--enable-prompt-tokens-details``; a small cache (``--num-gpu-blocks-override 400``) makes it evict.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import pytest
import zmq.asyncio

from dualmap.scheduling.prompts.cache_groups import last_end
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.workers.kv_events.decoding import Stored
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.group_holdings import KINDS
from dualmap.workers.kv_events.sockets import EventSockets
from dualmap.workers.kv_events.source import EventSource, source_said
from tests.conformance.tiny_models import CONFIGS, served
from tests.support.ports import free_port

COMMAND = os.environ.get("DUALMAP_VLLM_COMMAND", "")
REAL_MODELS = [*CONFIGS] if COMMAND else []
REAL_URLS = [url for url in os.environ.get("DUALMAP_VLLM_HYBRID_URLS", "").split(",") if url]
MOST_TOKENS = 1800
GROUPS = {
    "windows": ("window:128", "window:128"),
    "unequal blocks": ("window:96:64",),
    "states": ("state:128", "state:128"),
}


class Followed:
    """What a server's cache holds by its events."""

    def __init__(self, sockets: EventSockets) -> None:
        self._sockets = sockets
        self._view = EngineView()
        self._next = 0
        self._ends: dict[int, bool] = {}
        self.block_tokens = 0

    async def read(self) -> None:
        """Read what was published since the last call."""
        async for batch in self._sockets.replay(self._next):
            if batch.sequence != self._next:
                pytest.skip("the server no longer keeps its first events")
            self._view.apply(batch)
            self._next += 1
            for event in batch.events:
                if isinstance(event, Stored) and KINDS.get(event.kind) == "full":
                    self.block_tokens = max(self.block_tokens, event.block_tokens)  # parts of blocks are announced, too
        change, cleared = self._view.take_change(0, 0.0)
        ends = {} if cleared else {block: end for block, end in self._ends.items() if block not in {*change.removed}}
        self._ends = ends | dict.fromkeys(change.stored, True) | dict.fromkeys(change.inner, False)

    @property
    def is_hybrid(self) -> bool:
        return bool(self._view.groups)

    def hit_tokens(self, ids: list[int]) -> int:
        size = self.block_tokens
        listed = [self._ends.get(block) for block in engine_chain(ids, size).hashes]
        most = (len(ids) - 1) // size
        return min(most, last_end([None if end is None else not end for end in listed], most)) * size


@dataclass(frozen=True)
class Hybrid:
    url: str
    real: bool


@pytest.fixture(params=[*GROUPS, *REAL_URLS, *REAL_MODELS])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Hybrid]:
    if request.param in REAL_URLS:
        yield Hybrid(request.param, real=True)
        return
    if request.param in REAL_MODELS:
        async with served(COMMAND, request.param, tmp_path) as url:
            yield Hybrid(url, real=True)
        return
    settings = EmulatorSettings(
        port=free_port(10, 20), kv_events_port_offset=10, block_tokens=32, kv_capacity_tokens=200 * 32,
        max_num_batched_tokens=512, max_model_len=2080, time_scale=1000.0, cache_groups=GROUPS[request.param],
    )  # fmt: skip
    async with emulated_instances(settings) as (instance,):
        yield Hybrid(instance.url, real=False)


def source_of(url: str, said: object) -> EventSource:
    source = source_said(InstanceSpec("a", url), said)
    if source is None or source.replay_endpoint is None:
        pytest.skip(f"{url} publishes no KV events that can be replayed")
    return source


@pytest.mark.timeout(1200)
async def test_each_hit_is_known_before(server: Hybrid) -> None:
    rng, context, url = Random(), zmq.asyncio.Context(), server.url
    prompts: list[list[int]] = [[]]
    wrong, hits = [], 0
    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        source = source_of(url, (await http.get("/kv_event_sources")).json())
        sockets = EventSockets(context, source.endpoint, source.replay_endpoint, source.topic)
        followed = Followed(sockets)
        body = {"model": model, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        for _ in range(100):
            ids = rng.choice(prompts[-6:])
            if rng.random() < 0.3:
                ids = ids[: rng.randrange(len(ids) + 1)]
            ids = [*ids[: MOST_TOKENS - 300], *(rng.randrange(300, 3000) for _ in range(rng.randrange(30, 300)))]
            if server.real:
                await asyncio.sleep(0.25)  # events may leave the server that much behind the answer
            await followed.read()
            expected = followed.hit_tokens(ids) if followed.block_tokens else 0
            answer = await http.post("/v1/completions", json=body | {"prompt": ids})
            answer.raise_for_status()
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
            hits += cached > 0
            if cached != expected:
                wrong.append((len(ids), expected, cached))
            prompts.append([*ids, *(answer.json()["choices"][0].get("token_ids") or ())])
        sockets.close()
        context.destroy(linger=0)

    assert followed.is_hybrid
    assert hits > 20
    assert len(wrong) <= int(server.real), wrong
