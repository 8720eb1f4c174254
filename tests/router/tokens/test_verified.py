"""A tokenizer whose counts are called exact only where an engine has confirmed them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dualmap.router.prompts.prompt import Unrendered, sent_prompt
from dualmap.router.tokens.comparison import Compared
from dualmap.router.tokens.verified import AGAIN_S, FILES, INSTANCES, POLL_S, VerifiedTokenizer
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.scheduling.prompts.token_trust import MISTRUSTED_S
from tests.router import tools

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS: dict[str, Any] = {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}


class Counter:
    """Always counts the same."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    async def chain(self, sent: Any, *, lora: str | None, block_tokens: int) -> Chain | None:
        return engine_chain([1] * self.tokens, block_tokens) if self.tokens else None

    async def chain_on(self, sent: Any, kind: Any, *, lora: str | None, block_tokens: int) -> Chain | None:
        return None

    async def close(self) -> None:
        pass


class Renderer:
    """Always renders the same, or not for the same reason."""

    found: Chain | Unrendered = Unrendered.OFF

    async def chain(self, sent: Any, *, lora: str | None, block_tokens: int) -> Chain | Unrendered:
        return self.found

    async def close(self) -> None:
        pass


class Fleet:
    """A tokenizer with two counters, beside instances that report ``engine`` tokens."""

    def __init__(self, clock: Any, *, files: int = 7, instances: int = 7, engine: int = 7) -> None:
        self.engine = engine
        self.results: list[str] = []
        self.unrendered: list[str] = []
        self.renderer = Renderer()
        self.miscounted = 0
        self.asked = 0
        self.texts: bool | None = True
        view: Any = SimpleNamespace(ready=("a",), instances={"a": tools.spec("a")})
        self.tokenizer = VerifiedTokenizer(
            {FILES: Counter(files), INSTANCES: Counter(instances)}, self.renderer, pool="p", view=lambda: view,
            clock=clock, count=self.results.append, unrendered=self.unrendered.append, miscounted=self._miscount,
            compare=self._compare,
        )  # fmt: skip

    def _miscount(self) -> None:
        self.miscounted += 1

    async def _compare(self, instance: Any) -> tuple[Compared, ...] | None:
        self.asked += 1
        sent = sent_prompt("/v1/completions", {"prompt": "x"})
        assert sent is not None and sent.source is not None
        return None if self.texts is None else (Compared(sent.source, 3, 3 + (not self.texts), self.texts),)

    async def send(self, body: dict[str, Any] = CHAT) -> str:
        """What the prompt is called; its instance then reports."""
        sent = sent_prompt(PATH, body)
        assert sent is not None
        read = await self.tokenizer.tokenize(sent, lora=None, block_tokens=4)
        assert (read.unrendered is not None) == (sent.images > 0 and self.results[-1] != "rendered")
        if read.count is not None:
            assert read.chain is not None
            self.tokenizer.reported(read.count, read.chain.prompt_tokens, self.engine, "a")
        return self.results[-1]


@pytest.fixture
def spec() -> Any:
    return tools.spec("a")


async def test_a_count_is_exact_after_texts_and_an_engine_confirmed_it(clock: Any, spec: Any) -> None:
    fleet = Fleet(clock)
    assert [await fleet.send() for _ in range(2)] == ["unverified"] * 2
    assert fleet.tokenizer.status == "unverified"
    assert await fleet.tokenizer.verify(spec)
    assert [await fleet.send(), await fleet.send(TOOLS), await fleet.send(TOOLS)] == ["exact", "unverified", "exact"]
    assert (fleet.tokenizer.status, fleet.tokenizer.is_mistrusted, fleet.miscounted) == ("exact", False, 0)


async def test_files_that_differ_give_way_to_the_instances_and_everything_says_so(
    clock: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(clock, files=5)
    fleet.texts = False
    with caplog.at_level(logging.WARNING):
        assert await fleet.tokenizer.verify(spec)
    assert [await fleet.send() for _ in range(3)] == ["unverified", "exact", "exact"]
    assert fleet.miscounted == 0, "the instances count"
    assert fleet.tokenizer.is_mistrusted and fleet.tokenizer.status == f"mistrusted ({INSTANCES})"
    assert "1 of 1 texts have other tokens there" in caplog.text and INSTANCES in caplog.text


async def test_a_count_that_differed_is_never_called_exact_again(
    clock: Any, spec: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(clock, engine=8)  # both count 7
    await fleet.tokenizer.verify(spec)
    with caplog.at_level(logging.WARNING):
        called = [await fleet.send(TOOLS) for _ in range(5)]
    assert called == ["unverified", "unverified", "bytes", "bytes", "bytes"]
    assert (fleet.miscounted, fleet.tokenizer.is_mistrusted) == (2, True)
    assert "1 kinds of requests mistrusted" in fleet.tokenizer.status
    assert "counted 7 tokens where a counted 8, in a request with" in caplog.text and "tools" in caplog.text
    fleet.engine = 7
    assert [await fleet.send(), await fleet.send()] == ["unverified", "exact"], "another kind of request"
    clock.now_s += MISTRUSTED_S
    fleet.engine = 8
    assert "exact" not in [await fleet.send(TOOLS) for _ in range(5)]


async def test_texts_are_compared_at_the_start_and_when_counts_give_reason_to(clock: Any, spec: Any) -> None:
    fleet, slept = Fleet(clock), []

    class EndError(Exception):
        pass

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        clock.now_s += delay_s
        if len(slept) % 3 == 0:
            raise EndError

    clock.sleep = sleep

    async def run() -> int:
        before = fleet.asked
        with pytest.raises(EndError):
            await fleet.tokenizer.run()
        return fleet.asked - before

    fleet.texts = None
    assert (await run(), slept) == (3, [AGAIN_S] * 3)
    fleet.texts = True
    assert await run() == 1 and slept[-1] == POLL_S
    for number in range(4):
        await fleet.send({**CHAT, "chat_template_kwargs": {"a": number}})
    assert await run() == 0
    fleet.engine = 8
    for body in (CHAT, TOOLS, {**CHAT, "reasoning_effort": "low"}):
        await fleet.send(body)
    assert await run() == 1


IMAGE: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/cat"}}]}]
}


async def test_a_prompt_with_an_image_is_rendered_or_known_up_to_it(clock: Any) -> None:
    fleet = Fleet(clock)
    assert (await fleet.send(IMAGE), fleet.unrendered) == ("head", [Unrendered.OFF])
    fleet.renderer.found = engine_chain([1] * 7, 4)
    assert (await fleet.send(IMAGE), fleet.unrendered) == ("rendered", [Unrendered.OFF])
    assert (fleet.miscounted, fleet.tokenizer.is_mistrusted) == (0, False)


async def test_renderings_that_an_instance_counted_otherwise_are_not_used_for_such_prompts(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(clock, engine=8)
    fleet.renderer.found = engine_chain([1] * 7, 4)
    assert [await fleet.send(IMAGE) for _ in range(3)] == ["rendered", "head", "head"]
    assert fleet.unrendered == [Unrendered.MISTRUSTED] * 2 and fleet.tokenizer.is_mistrusted
    assert "the average of images" in caplog.text
    clock.now_s += MISTRUSTED_S
    fleet.engine = 7
    assert [await fleet.send(IMAGE) for _ in range(2)] == ["rendered"] * 2
