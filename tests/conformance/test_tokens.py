"""Prompt tokens as the fleet counts them, beside what the server reports: whatever is called exact is equal.

With ``DUALMAP_VLLM_TOKENIZER`` set to the folder of the real server's tokenizer, and ``DUALMAP_VLLM_CHAT_TEMPLATE`` to
its ``--chat-template`` where it has one, the fleet's own rendering is tested too. A template that writes all it is
given, as ``everything.jinja`` here, shows the most. The server needs ``--enable-auto-tool-choice`` and a
``--tool-call-parser``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.tokens.encoder import LocalEncoder
from dualmap.router.tokens.instance_client import InstanceClient
from dualmap.router.tokens.instance_tokenizer import InstanceTokenizer
from dualmap.router.tokens.model_files import read_templates
from dualmap.router.tokens.tokenizer import PoolTokenizer
from dualmap.router.tokens.verified import TokenCounter
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView
from tests.conformance.agent_sessions import SESSIONS
from tests.conformance.server import Server

BODIES = [
    pytest.param(path, body, id=f"{path[4:].replace('/', '-')}-{turn}")
    for path, session in SESSIONS.items()
    for turn, body in enumerate(session())
]


FOLDER, TEMPLATE = (os.environ.get(f"DUALMAP_VLLM_{name}") for name in ("TOKENIZER", "CHAT_TEMPLATE"))


@pytest.fixture(scope="module")
def encoder() -> LocalEncoder | None:
    return LocalEncoder(Path(FOLDER)) if FOLDER else None


@pytest.fixture(params=["instance", "files"])
async def tokenizer(
    request: pytest.FixtureRequest, server: Server, encoder: LocalEncoder | None
) -> AsyncIterator[TokenCounter]:
    made: TokenCounter
    if request.param == "instance":
        url = str(server.http.base_url).rstrip("/")
        spec = InstanceSpec("a", url, state=InstanceState.READY)
        view = ClusterView.build(epoch=1, tree_version=1, instances={"a": spec}, tree=HotnessTree())
        made = InstanceTokenizer(
            server.model,
            lambda: view,
            InstanceClient(),
            clock=RealClock(),
            timeout_s=30,
            max_bytes=1 << 20,
            count=lambda _: None,
        )
    else:
        if not server.real or FOLDER is None or encoder is None:
            pytest.skip("the server's tokenizer is not at hand")
        templates = read_templates(Path(FOLDER), template_file=Path(TEMPLATE) if TEMPLATE else None)
        made = PoolTokenizer(
            encoder, templates, threads=ThreadPoolExecutor(1), timeout_s=30, max_bytes=1 << 20,
            count=lambda _: None,
        )  # fmt: skip
    yield made
    await made.close()


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_session_of_an_agent_has_as_many_tokens_as_the_server_reports(
    server: Server, tokenizer: TokenCounter, path: str, body: dict[str, Any]
) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**body, "model": server.model, limit: 1}
    answer = await server.post(path, **body)
    chain = await tokenizer.chain(sent_prompt(path, body), lora=None, block_tokens=32)
    assert chain is not None
    assert chain.prompt_tokens == _prompt_tokens(answer["usage"])


def _prompt_tokens(usage: dict[str, Any]) -> int:
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    apart = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
    return int(usage["input_tokens"] + sum(apart))
