"""Adapters that come and go at run time, by the calls that the fleet makes: what the server lists, and which KV it
finds."""

from __future__ import annotations

import os
import random
import uuid
from dataclasses import replace

import pytest

from dualmap.runtime.engine_adapters import EngineAdapters
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, Step
from tests.conformance.server import Server

COMPLETIONS = "/v1/completions"
BLOCK_TOKENS, BLOCKS = 32, 3


@pytest.fixture
def adapter(server: Server) -> RegisteredAdapter:
    paths = os.environ.get("DUALMAP_VLLM_LORA_PATHS", "") if server.real else "/adapters/1"
    if not paths:
        pytest.skip("DUALMAP_VLLM_LORA_PATHS names no adapter that the server can load")
    return RegisteredAdapter(paths.split(":")[0])


@pytest.fixture
def name() -> str:
    return f"adapter-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def prompt() -> list[int]:
    rng = random.Random(uuid.uuid4().int)
    return [rng.randrange(100, 1000) for _ in range(BLOCKS * BLOCK_TOKENS + 1)]


async def cached_tokens(server: Server, name: str, prompt: list[int]) -> int:
    answer = await server.post(COMPLETIONS, model=name, prompt=prompt, max_tokens=1)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_path_in_another_spelling_is_the_same_folder_and_other_kv(
    server: Server, adapter: RegisteredAdapter, name: str, prompt: list[int]
) -> None:
    """Weights that replace others, in place or after these were unloaded, never meet their KV; those that come back as
    they were do."""
    engines, url, whole = EngineAdapters(), str(server.http.base_url), BLOCKS * BLOCK_TOKENS
    steps = [(Step.LOAD, 0), (Step.REPLACE, 1), (Step.UNLOAD, 1), (Step.LOAD, 2), (Step.UNLOAD, 2), (Step.LOAD, 2)]
    found = []
    for step, generation in steps:
        present = replace(adapter, generation=generation)
        made = await engines.make(url, name, present, step)
        assert made.complaint == ""
        assert made.listed.paths.get(name) == (None if step is Step.UNLOAD else present.engine_path)
        if step is not Step.UNLOAD:
            found.append([await cached_tokens(server, name, prompt) for _ in range(2)])
    await engines.make(url, name, adapter, Step.UNLOAD)

    assert found == [[0, whole], [0, whole], [0, whole], [whole, whole]]


async def test_an_adapter_that_is_there_already_is_found_out_and_one_that_is_gone_is_unloaded(
    server: Server, adapter: RegisteredAdapter, name: str
) -> None:
    engines, url = EngineAdapters(), str(server.http.base_url)
    later = replace(adapter, generation=5)
    made = [
        await engines.make(url, name, present, step)
        for present, step in ((adapter, Step.LOAD), (adapter, Step.LOAD), (later, Step.LOAD))
    ]
    gone = [await engines.make(url, name, later, Step.UNLOAD) for _ in range(2)]

    assert [each.complaint for each in (*made, *gone)] == [""] * 5
    assert [each.listed.paths.get(name) for each in made] == [adapter.engine_path, adapter.path, later.engine_path]
    status, _ = await server.refused(COMPLETIONS, model=name, prompt="hello", max_tokens=1)
    assert status == 404


async def test_a_folder_that_is_not_there_is_named_by_the_server(server: Server, name: str) -> None:
    if not server.real:
        pytest.skip("the emulator has no folders")
    nowhere = RegisteredAdapter("/nowhere/at-all")

    made = await EngineAdapters().make(str(server.http.base_url), name, nowhere, Step.LOAD)

    if made.complaint.startswith("it loads no adapters at run time"):
        pytest.skip("the server loads no adapters at run time")
    assert "/nowhere/at-all" in made.complaint
    assert name not in made.listed.paths
