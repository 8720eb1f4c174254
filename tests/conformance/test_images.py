"""Prompts with images: rendered as they are computed, and told apart in KV events as the fleet does it.

A real server needs a model that sees images, and ``--enable-scale-out``; without either these tests are skipped.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from dualmap.router.prompts.prompt import Unrendered, sent_prompt
from dualmap.router.tokens.instance_client import InstanceClient
from dualmap.router.tokens.instance_renderer import InstanceRenderer
from dualmap.router.tokens.rendered_prompt import RENDER_PATH, read_rendered
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView
from dualmap.workers.kv_events.decoding import read_batch
from dualmap.workers.kv_events.engine_view import EngineView
from tests.conformance.event_frames import BLOCK_TOKENS, Events
from tests.conformance.server import Server
from tests.support.images import png_url

CHAT = "/v1/chat/completions"
FIRST, SECOND = png_url(300, 200, 20), png_url(120, 500, 90)


def body_of(*images: str, **fields: Any) -> dict[str, Any]:
    """A chat that no run before had."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": f"{uuid.uuid4()} Compare what you see. " * 5}]
    for number, image in enumerate(images):
        shown = {"type": "image_url", "image_url": {"url": image}}
        parts += [shown, {"type": "text", "text": f"This was number {number}. "}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0, **fields}


@pytest.fixture
async def seeing(server: Server) -> Server:
    answer = await server.http.post(
        RENDER_PATH, json={"model": server.model, "mm_payload": "none", **body_of(png_url(64, 64))}
    )
    if server.real and (answer.status_code != 200 or not answer.json().get("features")):
        pytest.skip(f"the server renders no prompts with images: {answer.status_code}")
    return server


async def chain_of(renderer: InstanceRenderer, body: dict[str, Any]) -> Chain:
    sent = sent_prompt(CHAT, body)
    assert sent is not None
    chain = await renderer.chain(sent, lora=None, block_tokens=BLOCK_TOKENS)
    assert not isinstance(chain, Unrendered), chain
    return chain


@pytest.fixture
async def renderer(seeing: Server) -> Any:
    spec = InstanceSpec("a", str(seeing.http.base_url).rstrip("/"), state=InstanceState.READY)
    view = ClusterView.build(epoch=1, tree_version=1, instances={"a": spec}, tree=HotnessTree())
    made = InstanceRenderer(
        seeing.model, lambda: view, Learned, InstanceClient(), clock=RealClock(), timeout_s=60, max_bytes=1 << 22
    )
    yield made
    await made.close()


async def test_a_rendering_has_the_tokens_that_are_computed_and_the_places_of_images(seeing: Server) -> None:
    body = body_of(FIRST, SECOND, FIRST)
    answer = await seeing.http.post(RENDER_PATH, json={"model": seeing.model, "mm_payload": "none", **body})
    rendered = read_rendered(answer.content, 3)
    usage = (await seeing.post(CHAT, **body))["usage"]
    assert usage["prompt_tokens"] == len(rendered.ids)
    first, second, third = rendered.images
    assert first.identifier == third.identifier != second.identifier and first.length == third.length
    for each in rendered.images:
        assert len(set(rendered.image(rendered.images.index(each)).ids)) == 1


async def test_an_image_that_is_known_is_put_where_its_stand_in_was_rendered(
    seeing: Server, renderer: InstanceRenderer
) -> None:
    await chain_of(renderer, body_of(FIRST, SECOND))
    body = body_of(SECOND, FIRST, SECOND)
    answer = await seeing.http.post(RENDER_PATH, json={"model": seeing.model, "mm_payload": "none", **body})
    assert await chain_of(renderer, body) == read_rendered(answer.content, 3).chain(BLOCK_TOKENS, None, None)


@pytest.mark.parametrize("salt", [None, "a secret"])
async def test_events_name_the_blocks_of_a_rendered_prompt(
    seeing: Server, renderer: InstanceRenderer, events: Events, salt: str | None
) -> None:
    body = body_of(FIRST, SECOND, **({} if salt is None else {"cache_salt": salt}))
    chain = await chain_of(renderer, body)
    await seeing.post(CHAT, **body)
    expected = set(chain.hashes[: chain.prompt_tokens // BLOCK_TOKENS])
    async with asyncio.timeout(20):
        while True:
            view = EngineView()
            for number, frames in enumerate((await events.replay(0))[:-1]):
                view.apply(read_batch(number, frames[-1]))
            stored = set(view.take_change(0, 0.0)[0].stored)
            if expected <= stored:
                return
            await asyncio.sleep(0.05)
