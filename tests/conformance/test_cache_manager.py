"""Windows of many layouts beside full attention: what vLLM's own cache manager finds is known before by its events.

No server is needed, only an interpreter that has vLLM; it takes some seconds a layout:

    DUALMAP_VLLM_PYTHON=python scripts/test tests/conformance/test_cache_manager.py
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from dualmap.scheduling.prompts.cache_groups import last_end
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.workers.kv_events.decoding import read_batch
from dualmap.workers.kv_events.engine_view import EngineView
from tests.conformance import vllm_cache_manager

PYTHON = os.environ.get("DUALMAP_VLLM_PYTHON", "")
LAYOUTS = {
    "one group": ("full:32", 200),
    "a draft layer": ("eagle:32", 200),
    "a draft layer and windows": ("window:64:96,window:64:96,eagle:32", 400),
    "a draft layer and shorter windows": ("window:32:96,window:32:96,eagle:64", 400),
    "windows": ("window:32:128,window:32:128,full:32", 400),
    "longer windows": ("window:64:96,window:64:96,full:32", 300),
    "shorter windows": ("window:32:96,window:32:96,full:64", 400),
    "windows of parts": ("window:4:8,window:8:128,window:64:128,full:256", 1500),
}


@pytest.mark.skipif(not PYTHON, reason="DUALMAP_VLLM_PYTHON names no interpreter that has vLLM")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_what_the_cache_manager_finds_is_known_before(layout: str) -> None:
    """Another worker takes over before each request."""
    groups, blocks = LAYOUTS[layout]
    block_tokens = next(int(each.split(":")[1]) for each in groups.split(",") if each.startswith(("full", "eagle")))
    dropped = int("eagle" in groups)
    manager = await asyncio.create_subprocess_exec(
        PYTHON, str(Path(vllm_cache_manager.__file__)), groups, str(blocks), "1", stdout=asyncio.subprocess.PIPE
    )
    written, _ = await manager.communicate()
    assert manager.returncode == 0

    view, ends, entries = EngineView(), dict[int, bool](), dict[bytes, bytes]()
    wrong, hits, removed = [], 0, 0
    for line in map(json.loads, written.splitlines()):
        if "batch" in line:
            view.apply(read_batch(0, bytes.fromhex(line["batch"])))
            continue
        change, _ = view.take_change(0, 0.0)
        ends = {block: end for block, end in ends.items() if block not in {*change.removed}}
        ends |= dict.fromkeys(change.stored, True) | dict.fromkeys(change.inner, False)
        entries = {name: known for name, known in {**entries, **change.names}.items() if known}
        view = EngineView(entries)
        prompt, cached = line["prompt"], line["cached"]
        listed = [ends.get(block) for block in engine_chain(prompt, block_tokens).hashes]
        held = listed.index(None) if None in listed else len(listed)
        most = max(0, min(held, (len(prompt) - 1) // block_tokens) - dropped)
        expected = min(most, last_end([None if end is None else not end for end in listed], most)) * block_tokens
        hits, removed = hits + (cached > 0), removed + len(change.removed)
        if expected != cached:
            wrong.append((len(prompt), expected, cached))

    assert wrong == []
    assert hits > 100
    assert removed > 100
