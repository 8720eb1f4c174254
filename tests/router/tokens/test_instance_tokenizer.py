"""Token ids that an instance counts."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.tokens.instance_client import MAX_WAITING_FOR_TENANT, InstanceClient
from dualmap.router.tokens.instance_tokenizer import RETRY_S, InstanceTokenizer
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import BlockExtras, engine_chain
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.view import ClusterView
from dualmap.simulation.emulator.instance import EmulatedInstance
from dualmap.simulation.emulator.serve import emulated_instances
from dualmap.simulation.emulator.settings import EmulatorSettings
from tests.router import tools

BLOCK_TOKENS = 4
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def view_of(spec: InstanceSpec) -> ClusterView:
    return ClusterView.build(epoch=1, tree_version=1, instances={spec.instance_id: spec}, tree=HotnessTree())


class Instance(httpx.AsyncBaseTransport):
    """Its tokens are the lengths of the messages, or of the prompt's words."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.status = 200

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = orjson.loads(request.content)
        self.asked.append(asked)
        await self.open.wait()
        given = asked.get("prompt", "").split() or [message.get("content") or "" for message in asked["messages"]]
        return httpx.Response(self.status, json={"tokens": [len(each) for each in given]})


@pytest.fixture
async def instance() -> Instance:
    return Instance()


@pytest.fixture
def results() -> list[str]:
    return []


@pytest.fixture
async def tokenizer(instance: Instance, results: list[str], clock: Any) -> Any:
    view = view_of(tools.spec("a"))
    made = InstanceTokenizer(
        "m",
        lambda: view,
        InstanceClient(transport=instance),
        clock=clock,
        timeout_s=0.05,
        max_bytes=2000,
        count=results.append,
    )
    yield made
    await made.close()


async def chain_of(tokenizer: InstanceTokenizer, path: str, body: dict[str, Any], lora: Any = None) -> Chain | None:
    return await tokenizer.chain(sent_prompt(path, body), lora=lora, block_tokens=BLOCK_TOKENS)


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents], **fields}


async def test_a_prompt_is_asked_for_once_and_separated_by_adapter_and_salt(
    tokenizer: InstanceTokenizer, instance: Instance, results: list[str]
) -> None:
    body = {"prompt": "a bb ccc dddd eeeee"}
    for salt in (None, "s", None):
        sent = body if salt is None else {**body, "cache_salt": salt}
        expected = engine_chain([1, 2, 3, 4, 5], BLOCK_TOKENS, BlockExtras.of(None, salt))
        assert await chain_of(tokenizer, COMPLETIONS, sent) == expected
    assert instance.asked == [{"model": "m", "add_special_tokens": True, "prompt": body["prompt"]}]
    assert await chain_of(tokenizer, COMPLETIONS, body, "sql") == engine_chain(
        [1, 2, 3, 4, 5], 4, BlockExtras.of("sql")
    )
    assert instance.asked[1]["model"] == "sql"
    assert results == []


async def test_what_is_known_of_prompts_is_apart_for_each_tenant(
    tokenizer: InstanceTokenizer, instance: Instance
) -> None:
    for tenant in ("a", "b", "a"):
        sent = sent_prompt(CHAT, chat("one", "two"))
        sent.tenant = tenant
        assert await tokenizer.chain(sent, lora=None, block_tokens=BLOCK_TOKENS) == engine_chain([3, 3], BLOCK_TOKENS)

    assert len(instance.asked) == 2


async def test_a_prompt_that_makes_an_instance_fail_is_no_reason_to_leave_it_alone(
    tokenizer: InstanceTokenizer, instance: Instance
) -> None:
    instance.status = 500
    assert await chain_of(tokenizer, CHAT, chat("odd")) is None
    instance.status = 200

    assert await chain_of(tokenizer, CHAT, chat("a")) is not None


async def test_a_chat_is_asked_for_with_all_that_its_template_may_see(
    tokenizer: InstanceTokenizer, instance: Instance
) -> None:
    fields = {"tools": [{"type": "function"}], "chat_template_kwargs": {"x": 1}, "reasoning_effort": "low"}
    await chain_of(tokenizer, CHAT, chat("hi", max_tokens=3, **fields))
    asked = instance.asked[0]
    assert (asked["tools"], asked["add_special_tokens"]) == (fields["tools"], False)
    assert asked["chat_template_kwargs"] == {"x": 1, "enable_thinking": True, "reasoning_effort": "low"}
    assert "max_tokens" not in asked


async def test_what_only_other_apis_call_text_and_reasoning_is_asked_for_as_such(
    tokenizer: InstanceTokenizer, instance: Instance
) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"input": [{"role": "user", "content": parts}, {"type": "reasoning", "content": [{"text": "c"}]}]}
    await chain_of(tokenizer, "/v1/responses", body)
    assert instance.asked[0]["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning": "c"},
    ]
    await chain_of(tokenizer, CHAT, {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "d"}]})
    assert instance.asked[1]["messages"][0]["reasoning"] == "d"


async def test_a_late_answer_serves_the_next_request_with_the_prompt(
    tokenizer: InstanceTokenizer, instance: Instance, results: list[str]
) -> None:
    instance.open.clear()
    assert await asyncio.gather(*[chain_of(tokenizer, CHAT, chat("one", "two")) for _ in range(3)]) == [None] * 3
    instance.open.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert await chain_of(tokenizer, CHAT, chat("one", "two")) == engine_chain([3, 3], BLOCK_TOKENS)
    assert (len(instance.asked), results) == (1, ["late"] * 3)


async def test_prompts_beyond_the_bound_have_byte_blocks_at_once(
    tokenizer: InstanceTokenizer, instance: Instance, results: list[str]
) -> None:
    instance.open.clear()
    asking = [
        asyncio.create_task(chain_of(tokenizer, CHAT, chat(str(number)))) for number in range(MAX_WAITING_FOR_TENANT)
    ]
    await asyncio.sleep(0)
    assert await chain_of(tokenizer, CHAT, chat("one more")) is None
    assert results == ["busy"]
    sent = sent_prompt(CHAT, chat("another tenant's"))
    sent.tenant = "other"
    asking.append(asyncio.create_task(tokenizer.chain(sent, lora=None, block_tokens=BLOCK_TOKENS)))
    await asyncio.sleep(0)
    assert results == ["busy"]
    await asyncio.gather(*asking)


async def test_an_instance_that_cannot_count_is_left_alone_for_a_while(
    tokenizer: InstanceTokenizer, instance: Instance, results: list[str], clock: Any
) -> None:
    instance.status = 404
    assert [await chain_of(tokenizer, CHAT, chat(text)) for text in ("a", "b")] == [None, None]
    assert len(instance.asked) == 1
    instance.status = 200
    clock.now_s += RETRY_S
    assert await chain_of(tokenizer, CHAT, chat("a")) is not None
    assert results == ["bytes", "bytes"]


async def test_what_is_kept_is_bounded(tokenizer: InstanceTokenizer, instance: Instance) -> None:
    for number in range(50):
        assert await chain_of(tokenizer, CHAT, chat(str(number))) is not None
        assert tokenizer.memory_bytes <= 2000
    await chain_of(tokenizer, CHAT, chat("49"))
    assert len(instance.asked) == 50
    await chain_of(tokenizer, CHAT, chat("0"))
    assert len(instance.asked) == 51


async def test_an_emulated_instance_counts_as_it_reports(clock: Any) -> None:
    async with emulated_instances(EmulatorSettings(port=0)) as [server]:
        assert isinstance(server, EmulatedInstance)
        view = view_of(tools.spec("a", url=server.url))
        tokenizer = InstanceTokenizer(
            "qwen2.5-7b",
            lambda: view,
            InstanceClient(),
            clock=clock,
            timeout_s=10,
            max_bytes=1 << 20,
            count=lambda _: None,
        )
        body = {"model": "qwen2.5-7b", **chat("How many tokens are there?", "Many.")}
        found = await chain_of(tokenizer, CHAT, body)
        async with httpx.AsyncClient() as client:
            answer = (await client.post(f"{server.url}{CHAT}", json={**body, "max_tokens": 1})).json()
        await tokenizer.close()
    assert found is not None and found.prompt_tokens == answer["usage"]["prompt_tokens"]
