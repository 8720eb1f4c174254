"""One suite against two servers: the emulator, in every run, and a real vLLM where one is given.

    DUALMAP_VLLM_URL=http://127.0.0.1:8000 scripts/test tests/conformance

With ``DUALMAP_VLLM_START`` set to a command as well, the suite runs it first and waits for its end: it must return once
the server serves. ``DUALMAP_VLLM_STOP`` is run afterwards. The server needs ``--enable-prompt-tokens-details`` and
``--enable-request-id-headers``, prefix caching in blocks of 32 tokens, and a chat model of 2,048 tokens of context.
With ``VLLM_ENABLE_RESPONSES_API_STORE=1`` in its environment it stores responses, with ``VLLM_SERVER_DEV_MODE=1`` it
can be paused, with ``--enable-scale-out`` answers can be aborted, and ``DUALMAP_VLLM_LORA_PATHS`` names two adapters,
with a colon between them, that it can load (``--enable-lora``, ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``;
``python -m benchmarks.random_adapters MODEL OUT`` makes some of rank 8 and prints these paths): each is tested then.
Sessions of agents need ``--enable-auto-tool-choice --tool-call-parser hermes``. Prompts with images need a model that
sees images, beside ``--enable-scale-out``.

KV events are tested where ``DUALMAP_VLLM_KV_EVENTS`` and ``DUALMAP_VLLM_KV_REPLAY`` tell the server's endpoints, as
``tcp://127.0.0.1:5557``; its topic is to begin with ``kv@``. Hybrid models need no server: the suite starts those of
``tiny_models`` by the command of a vLLM for CPUs (``DUALMAP_VLLM_HYBRID_URLS`` names servers that run already):

    DUALMAP_VLLM_COMMAND=vllm scripts/test tests/conformance/test_hybrid_hits.py

Windows of many layouts need an interpreter that has vLLM alone, for its cache manager:

    DUALMAP_VLLM_PYTHON=python scripts/test tests/conformance/test_cache_manager.py

Embeddings, scores and reranking need a server with ``--runner pooling --convert embed``:

    DUALMAP_VLLM_URL=http://127.0.0.1:8001 scripts/test tests/conformance/test_pooling.py
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from tests.conformance.event_frames import Events
from tests.conformance.server import Server, connected
from tests.support.ports import free_port

START_TIMEOUT_S = 600.0
REAL_URL = os.environ.get("DUALMAP_VLLM_URL")


@pytest.fixture(scope="session")
def real_url() -> Iterator[str | None]:
    start, stop = os.environ.get("DUALMAP_VLLM_START"), os.environ.get("DUALMAP_VLLM_STOP")
    if REAL_URL and start:
        subprocess.run(shlex.split(start), check=True, timeout=START_TIMEOUT_S)
    yield REAL_URL
    if REAL_URL and stop:
        subprocess.run(shlex.split(stop), check=True, timeout=START_TIMEOUT_S)


@pytest.fixture(params=["emulator", *(["vllm"] if REAL_URL else [])])
async def server(request: pytest.FixtureRequest, real_url: str | None) -> AsyncIterator[Server]:
    if request.param == "vllm":
        assert real_url is not None
        async with connected(real_url, real=True) as found:
            endpoints = [os.environ.get(f"DUALMAP_VLLM_KV_{name}") for name in ("EVENTS", "REPLAY")]
            yield replace(found, kv_events=endpoints[0], kv_replay=endpoints[1])
        return
    settings = EmulatorSettings(
        port=free_port(10, 20), time_scale=20.0, block_tokens=32, max_model_len=8192, store_responses=True,
        kv_events_port_offset=10, scale_out=True,
    )  # fmt: skip
    async with emulated_instances(settings) as (instance,), connected(instance.url, real=False) as found:
        (publisher,) = instance.kv_events
        yield replace(found, kv_events=publisher.endpoint, kv_replay=publisher.replay_endpoint)


@pytest.fixture
async def events(server: Server) -> AsyncIterator[Events]:
    if server.kv_events is None or server.kv_replay is None:
        pytest.skip("DUALMAP_VLLM_KV_EVENTS and DUALMAP_VLLM_KV_REPLAY do not tell where the server publishes")
    events = Events(server.kv_events, server.kv_replay)
    yield events
    events.close()
