"""Prompts with images that an instance renders."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import orjson
import pytest

from dualmap.api_bodies.prompt import LongTexts
from dualmap.router.prompts.prompt import Unrendered, sent_prompt
from dualmap.router.tokens import instance_client, instance_renderer
from dualmap.router.tokens.instance_client import MAX_ASKING, InstanceClient
from dualmap.router.tokens.instance_renderer import LATE_IN_ROW, RETRY_S, InstanceRenderer
from dualmap.router.tokens.rendered_prompt import RENDER_PATH, STAND_IN, two_stand_ins
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import BlockExtras, Medium, engine_chain
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.view import ClusterView
from dualmap.simulation.workload.tokenizer import TOKEN_BYTES, PromptText, encode, render_chat
from tests.router import tools
from tests.support.images import png, png_url

BLOCK_TOKENS = 8
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CAT, DOG, BIRD = png_url(280, 280, 1), png_url(560, 280, 2), png_url(28, 280, 3)


class Instance(httpx.AsyncBaseTransport):
    """Renders as emulated instances do."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.tried: list[str] = []
        """Hosts that were asked how they render two stand-ins."""
        self.numbers = False
        """Each image begins with its number."""
        self.open = asyncio.Event()
        self.open.set()
        self.status = 200
        self.answer: Any = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = orjson.loads(request.content)
        assert request.url.path == RENDER_PATH
        if request.content == two_stand_ins(body["model"]):
            self.tried.append(request.url.host)
        else:
            self.asked.append((request.url.host, body))
            await self.open.wait()
        rendered = numbered(body["messages"]) if self.numbers else render_chat(body["messages"], body.get("tools"))
        places = [{"offset": each.offset, "length": each.length} for each in rendered.images]
        features = {
            "mm_hashes": {"image": [each.identifier for each in rendered.images]},
            "mm_placeholders": {"image": places},
        }
        answer = {"token_ids": encode(rendered.data), "features": features}
        odd = self.answer is not None and self.asked
        return httpx.Response(self.status, json=self.answer if odd else answer)

    @property
    def images(self) -> list[list[str]]:
        """The images of each prompt that it was asked for."""
        return [
            [
                part["image_url"]["url"]
                for message in body["messages"]
                if isinstance(message["content"], list)
                for part in message["content"]
                if part["type"] == "image_url"
            ]
            for _, body in self.asked
        ]


def numbered(messages: list[dict[str, Any]]) -> PromptText:
    """The model's input where each image begins with its number."""
    rendered = render_chat(messages)
    data = bytearray(rendered.data)
    for number, image in enumerate(rendered.images):
        data[image.offset * TOKEN_BYTES : (image.offset + 1) * TOKEN_BYTES] = b"%04d" % number
    return PromptText(bytes(data), rendered.images)


def expected(prompt: PromptText, lora: str | None = None, salt: str | None = None) -> Chain:
    """The chain that the engine's own events come to."""
    media = [Medium(each.identifier, each.offset, each.length) for each in prompt.images]
    ids = [token & 0xFFFFFFFF for token in encode(prompt.data)]
    return engine_chain(ids, BLOCK_TOKENS, BlockExtras.of_media(media, BLOCK_TOKENS, lora, salt))


def chat(*images: str, text: str = "What is it? ", before: str = "You see.") -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": each}} for each in images]
    user = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"messages": [{"role": "system", "content": before}, user]}


@pytest.fixture
async def instance() -> Instance:
    return Instance()


@pytest.fixture
def learned() -> SimpleNamespace:
    return SimpleNamespace(now=Learned())


@pytest.fixture
async def renderer(instance: Instance, learned: Any, clock: Any) -> AsyncIterator[InstanceRenderer]:
    specs = {name: tools.spec(name, url=f"http://{name}:8000") for name in ("a", "b")}
    view = ClusterView.build(epoch=1, tree_version=1, instances=specs, tree=HotnessTree())
    made = InstanceRenderer(
        "m", lambda: view, lambda: learned.now, InstanceClient(transport=instance), clock=clock, timeout_s=60.0,
        max_bytes=40_000,
    )  # fmt: skip
    yield made
    await made.close()


async def chain_of(
    renderer: InstanceRenderer,
    body: dict[str, Any],
    path: str = CHAT,
    *,
    long: LongTexts | None = None,
    lora: str | None = None,
    tenant: str = "",
) -> Chain | Unrendered:
    sent = sent_prompt(path, body, long or {})
    assert sent is not None
    sent.tenant = tenant
    return await renderer.chain(sent, lora=lora, block_tokens=BLOCK_TOKENS)


async def test_the_chain_is_that_of_the_engine_s_events(renderer: InstanceRenderer, instance: Instance) -> None:
    body = chat(CAT, DOG) | {"tools": [{"type": "function", "function": {"name": "f", "description": "first"}}]}
    assert await chain_of(renderer, body) == expected(render_chat(body["messages"], body["tools"]))
    ((_, asked),) = instance.asked
    assert (asked["model"], asked["mm_payload"], asked["tools"]) == ("m", "none", body["tools"])


@pytest.mark.parametrize(("lora", "salt"), [("sql", None), (None, "secret"), ("sql", "secret")])
async def test_adapter_and_salt_separate_blocks_beside_images(
    renderer: InstanceRenderer, instance: Instance, lora: str | None, salt: str | None
) -> None:
    body = chat(CAT) | ({} if salt is None else {"cache_salt": salt})
    assert await chain_of(renderer, body, lora=lora) == expected(render_chat(body["messages"]), lora, salt)
    assert instance.asked[0][1]["model"] == (lora or "m")


async def test_an_image_is_sent_once_and_stands_in_every_later_prompt(
    renderer: InstanceRenderer, instance: Instance
) -> None:
    bodies = [chat(CAT), chat(DOG, CAT, text="And these two? "), chat(CAT, DOG, CAT), chat(DOG, before="Look.")]
    for body in (*bodies, *bodies):
        assert await chain_of(renderer, body) == expected(render_chat(body["messages"]))
    assert instance.images == [[CAT], [DOG, STAND_IN], [STAND_IN] * 3, [STAND_IN]]


async def test_prompts_that_come_at_once_send_their_image_once(renderer: InstanceRenderer, instance: Instance) -> None:
    bodies = [chat(CAT, text=text) for text in ("a", "b", "c", "a")] + [chat(DOG)]
    found = await asyncio.gather(*[chain_of(renderer, body) for body in bodies])
    assert found == [expected(render_chat(body["messages"])) for body in bodies]
    assert sorted(images[0] for images in instance.images) == sorted([CAT, DOG, STAND_IN, STAND_IN])


async def test_where_a_model_numbers_images_they_are_known_by_their_places_too(
    renderer: InstanceRenderer, instance: Instance
) -> None:
    instance.numbers = True
    assert await chain_of(renderer, chat(CAT)) is Unrendered.LATE, "it was not known yet"
    bodies = [chat(CAT), chat(DOG, CAT), chat(CAT, text="again"), chat(DOG, CAT, text="again"), chat(CAT, CAT)]
    for body in bodies:
        assert await chain_of(renderer, body) == expected(numbered(body["messages"]))
    assert instance.images == [[CAT], [DOG, CAT], [STAND_IN], [STAND_IN] * 2, [STAND_IN] * 2]
    assert len(instance.tried) == 1


async def test_images_of_other_apis_are_the_same_ones(renderer: InstanceRenderer, instance: Instance) -> None:
    expecting = expected(render_chat([{"role": "user", "content": chat(CAT)["messages"][1]["content"]}]))
    long, data = {"\0cat": CAT.encode(), "\0base": CAT.partition(",")[2].encode()}, CAT.partition(",")[2]
    text = {"type": "text", "text": "What is it? "}
    spoken = {"type": "input_text", "text": "What is it? "}

    def message(content: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": content}
        return {"model": "m", "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}]}

    def response(url: str) -> dict[str, Any]:
        return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}, spoken]}]}

    assert await chain_of(renderer, response(CAT), RESPONSES) == expecting
    assert await chain_of(renderer, message(data), MESSAGES) == expecting
    named = chat("\0cat")
    named["messages"] = named["messages"][1:]
    assert await chain_of(renderer, named, long=long) == expecting
    assert await chain_of(renderer, response("\0cat"), RESPONSES, long=long) == expecting
    assert await chain_of(renderer, message("\0base"), MESSAGES, long=long) == expecting
    seen = [image for images in instance.images for image in images]
    assert seen == [CAT, STAND_IN, CAT, STAND_IN, CAT], "a long one has another name, by each way of sending it"


async def test_a_late_answer_serves_the_next_prompt_with_the_image(
    renderer: InstanceRenderer, instance: Instance
) -> None:
    instance.open.clear()
    renderer.timeout_s = 0.01
    assert await chain_of(renderer, chat(CAT)) is Unrendered.LATE
    instance.open.set()
    renderer.timeout_s = 60.0
    later = chat(CAT, text="And now?")
    assert await chain_of(renderer, later) == expected(render_chat(later["messages"]))
    assert instance.images == [[CAT], [STAND_IN]]


async def test_no_request_waits_while_renderings_come_too_late(
    renderer: InstanceRenderer, instance: Instance, clock: Any
) -> None:
    assert isinstance(await chain_of(renderer, chat(CAT)), Chain)
    instance.open.clear()
    renderer.timeout_s = 0.01
    for text in ("a", "b", "c", "d", "e"):
        assert await chain_of(renderer, chat(CAT, text=text)) is Unrendered.LATE
    assert renderer.waiting == LATE_IN_ROW, "known images are not asked for in vain"
    for number in range(LATE_IN_ROW + 1):
        assert await chain_of(renderer, chat(png_url(280, 280, 100 + number))) is Unrendered.LATE
    assert renderer.waiting == LATE_IN_ROW + LATE_IN_ROW + 1, "new ones are, for later prompts"
    renderer.timeout_s = 60.0
    assert await chain_of(renderer, chat(CAT, text="f")) is Unrendered.LATE
    instance.open.set()
    clock.now_s += RETRY_S
    found = [await chain_of(renderer, chat(CAT, text=text)) for text in ("f", "g")]
    assert found == [expected(render_chat(chat(CAT, text=text)["messages"])) for text in ("f", "g")]


async def test_what_is_known_of_images_is_apart_for_each_tenant(renderer: InstanceRenderer, instance: Instance) -> None:
    """Clients name images as they like, and one that was sent before is answered sooner."""
    named = {"type": "image_url", "uuid": "logo", "image_url": {"url": CAT}}
    await chain_of(renderer, {"messages": [{"role": "user", "content": [named]}]}, tenant="a")
    other = {"role": "user", "content": [{**named, "image_url": {"url": DOG}}]}

    assert await chain_of(renderer, {"messages": [other]}, tenant="b") == expected(render_chat([other]))
    assert await chain_of(renderer, chat(CAT), tenant="b") == await chain_of(renderer, chat(CAT), tenant="a")
    assert instance.images == [[CAT], [DOG], [CAT], [CAT]]


async def test_the_late_renderings_of_one_tenant_keep_no_other_from_waiting(
    renderer: InstanceRenderer, instance: Instance
) -> None:
    instance.open.clear()
    renderer.timeout_s = 0.01
    for number in range(MAX_ASKING + 1):
        slow = chat(png_url(280, 280, 100 + number))
        assert await chain_of(renderer, slow, tenant="slow") is Unrendered.LATE
    renderer.timeout_s = 60.0
    other = asyncio.create_task(chain_of(renderer, chat(CAT), tenant="other"))
    for _ in range(100):
        await asyncio.sleep(0)
    assert [CAT] in instance.images, "it has a turn"
    instance.open.set()

    assert isinstance(await other, Chain), "it is waited for"


@pytest.mark.parametrize("how", ["status", "time"])
async def test_an_image_that_cannot_be_fetched_blames_no_instance(
    renderer: InstanceRenderer, instance: Instance, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    assert isinstance(await chain_of(renderer, chat(DOG)), Chain)
    if how == "status":
        instance.status = 500
    else:
        monkeypatch.setattr(instance_client, "QUERY_TIMEOUT_S", 0.01)
        instance.open.clear()
    for number in range(4):
        unfetched = chat(f"http://nowhere/{number}.png", text="long " * 400)
        assert await chain_of(renderer, unfetched) is Unrendered.REFUSED
    instance.status = 200
    instance.open.set()
    monkeypatch.undo()

    assert isinstance(await chain_of(renderer, chat(CAT)), Chain)


async def test_an_answer_beyond_all_sizes_is_none(
    renderer: InstanceRenderer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert isinstance(await chain_of(renderer, chat(DOG)), Chain)
    monkeypatch.setattr(instance_client, "MAX_ANSWER_BYTES", 100)

    assert await chain_of(renderer, chat(CAT)) is Unrendered.OFF
    assert "its answer is longer than 100 bytes" in caplog.text


async def test_an_instance_that_does_not_render_is_left_alone_for_a_while(
    renderer: InstanceRenderer, instance: Instance, clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    instance.status = 403
    found = [await chain_of(renderer, chat(image)) for image in (CAT, DOG, BIRD, CAT)]
    assert found == [Unrendered.OFF] * 4
    assert sorted(instance.tried) == ["a", "b"] and instance.asked == [], "no image was sent"
    assert caplog.text.count("--enable-scale-out") == 2
    clock.now_s += RETRY_S
    assert await chain_of(renderer, chat(CAT)) is Unrendered.OFF
    assert caplog.text.count("--enable-scale-out") == 2
    instance.status = 200
    assert isinstance(await chain_of(renderer, chat(CAT)), Chain)


async def test_an_image_of_a_prompt_that_was_refused_is_not_sent_again_for_a_while(
    renderer: InstanceRenderer, instance: Instance, clock: Any
) -> None:
    instance.status = 400
    found = [await chain_of(renderer, chat(CAT, text=text)) for text in ("a", "b")]
    assert found == [Unrendered.REFUSED] * 2 and len(instance.asked) == 1
    instance.status = 200
    assert isinstance(await chain_of(renderer, chat(DOG)), Chain), "another image"
    clock.now_s += RETRY_S + 1
    assert isinstance(await chain_of(renderer, chat(CAT)), Chain)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2], "features": None},
        {"token_ids": ["a"], "features": {"mm_hashes": {}, "mm_placeholders": {}}},
        {
            "token_ids": [1, 2],
            "features": {"mm_hashes": {"audio": ["x"]}, "mm_placeholders": {"audio": [{"offset": 0, "length": 1}]}},
        },
        {
            "token_ids": [1, 2],
            "features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}},
        },
        {
            "token_ids": [1, 2],
            "features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 0}]}},
        },
        {
            "token_ids": [1, 2],
            "features": {"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": "1", "length": 1.5}]}},
        },
        {
            "token_ids": [1, 2, 3],
            "features": {
                "mm_hashes": {"image": ["x", "y"]},
                "mm_placeholders": {"image": [{"offset": 1, "length": 1}, {"offset": 2, "length": 1}]},
            },
        },
    ],
)
async def test_an_answer_that_is_no_prompt_with_these_images_is_not_used(
    renderer: InstanceRenderer, instance: Instance, answer: Any
) -> None:
    instance.answer = answer
    assert await chain_of(renderer, chat(CAT)) is Unrendered.REFUSED


async def test_a_prompt_whose_estimate_costs_less_is_not_rendered(
    renderer: InstanceRenderer, instance: Instance, learned: Any
) -> None:
    learned.now = Learned(image_tokens=100.0)
    assert await chain_of(renderer, chat(CAT)) is Unrendered.SMALL
    assert isinstance(await chain_of(renderer, chat(CAT, DOG, BIRD)), Chain)
    assert isinstance(await chain_of(renderer, chat(CAT, text="long " * 200)), Chain)


async def test_sound_and_images_without_content_are_estimated(renderer: InstanceRenderer, instance: Instance) -> None:
    sound = {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]}
    body = chat(CAT)
    assert await chain_of(renderer, {"messages": [*body["messages"], sound]}) is Unrendered.OTHER_MEDIA
    named = {"role": "user", "content": [{"type": "image_url", "uuid": "mine", "image_url": None}]}
    assert await chain_of(renderer, {"messages": [named]}) is Unrendered.REFUSED
    assert instance.asked == []
    named["content"] = [{"type": "image_url", "uuid": "mine", "image_url": {"url": CAT}}]
    assert await chain_of(renderer, {"messages": [named]}) == expected(render_chat([named]))
    named = {"role": "user", "content": [{"type": "image_url", "uuid": "mine", "image_url": None}]}
    assert isinstance(await chain_of(renderer, {"messages": [named]}), Chain), "it is known by its name now"


@pytest.mark.parametrize(
    ("url", "text"),
    [("https://x/\ud800.png", "a"), ("https://x/a.png", "\ud800"), ("\0long", "a"), (None, "a"), (7, "a")],
)
async def test_what_is_not_utf_8_or_no_url_is_estimated(
    renderer: InstanceRenderer, instance: Instance, url: Any, text: str
) -> None:
    long = {"\0long": "data:\ud800".encode("utf-8", "surrogatepass")}
    body = chat("x", text=text)
    body["messages"][1]["content"][0]["image_url"] = {"url": url}
    assert await chain_of(renderer, body, long=long) is Unrendered.REFUSED
    assert instance.asked == []


async def test_images_beyond_the_bound_wait_for_no_rendering(
    renderer: InstanceRenderer, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instance_renderer, "MAX_WAITING_BYTES", len(DOG) + 10)
    instance.open.clear()
    first = asyncio.create_task(chain_of(renderer, chat(CAT)))
    await asyncio.sleep(0)
    assert await chain_of(renderer, chat(DOG)) is Unrendered.BUSY
    instance.open.set()
    assert isinstance(await first, Chain) and isinstance(await chain_of(renderer, chat(DOG)), Chain)


async def test_what_is_kept_is_bounded(renderer: InstanceRenderer, instance: Instance) -> None:
    for number in range(60):
        assert isinstance(await chain_of(renderer, chat(png_url(280, 280, 100 + number))), Chain)
        assert renderer.memory_bytes <= 40_000
    await chain_of(renderer, chat(png_url(280, 280, 159), text="again"))
    await chain_of(renderer, chat(png_url(280, 280, 100), text="again"))
    assert [images == [STAND_IN] for images in instance.images[-2:]] == [True, False]


async def test_a_large_image_is_read_and_sent_whole(renderer: InstanceRenderer, instance: Instance) -> None:
    noise = bytes((number * number) % 251 for number in range(200_000))
    large = "data:image/png;base64," + b64encode(png(280, 280, 9) + noise).decode()
    body = chat(large)
    assert await chain_of(renderer, body) == expected(render_chat(body["messages"]))
    assert instance.images == [[large]]
