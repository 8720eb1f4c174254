"""A chat whose beginning is known has the tokens that the whole chat has, and costs those of what is new."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualmap.api_bodies import listed_json
from dualmap.router.errors import NotFoundError
from dualmap.router.http.body_budget import BodyBudget
from dualmap.router.http.long_bodies import LongBodies
from dualmap.router.prompts import known_bodies
from dualmap.router.prompts.inference_request import SentPrompt, response_id
from dualmap.router.prompts.known_bodies import ChatShape, ContinuedChat
from dualmap.router.prompts.prompt import ReadPrompt, TokenizedHow, Unrendered, read_prompt
from dualmap.router.tokens import split_chats
from dualmap.router.tokens.chat_template import ChatTemplate
from dualmap.router.tokens.encoder import LocalEncoder
from dualmap.router.tokens.fast_tokenizer import Encoded
from dualmap.router.tokens.model_files import templates_of
from dualmap.router.tokens.split_chats import SplitChats
from dualmap.router.tokens.tokenizer import PoolTokenizer
from dualmap.router.tokens.verified import FILES, VerifiedTokenizer
from dualmap.runtime.clock import RealClock
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.tenants.tenant import Tenant
from tests.router.tokens.tokenizer_files import TEMPLATE
from tests.support.conversations import CHAT, MESSAGES, NAMES, RESPONSES, TENANT, bodies_of, request_of

STRETCH_BYTES = 64
RULE = BlockRule(4, 16)

THINKING = """
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- set ns = namespace(last=messages | length - 1, searching=true) %}
{%- for message in messages[::-1] %}
{%- if ns.searching and message.role == "user" and not message.content.startswith("<tool_response>") %}
{%- set ns.searching = false %}{% set ns.last = messages | length - loop.index %}
{%- endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{%- set content = message.content or "" %}
{%- if message.role == "assistant" and "</think>" in content %}
{%- if loop.index0 > ns.last %}
<think>{{ content.split("</think>")[0] }}</think>
{%- endif %}
{{ content.split("</think>")[-1] }}
{%- elif message.role == "assistant" and loop.index0 > ns.last and loop.last %}
<think></think>
{{ content }}
{%- else %}
{{ content }}
{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
"""Like Qwen3's: results of tools are one message, thoughts of former turns are dropped, the last answer differs."""
SYSTEM_LAST = """
{%- for message in messages %}{% if message.role != "system" %}<|im_start|>{{ message.role }}
{%- if loop.last and messages[0].role == "system" %}{{ messages[0].content }}{% endif %}
{{ message.content }}<|im_end|>{% endif %}{% endfor %}<|im_start|>assistant"""
"""Like Mistral's: the last message has the system's words."""
TRIMMED = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls and loop.index0 < ns.last %}{{ message.content | trim }}{% else %}{{ message.content }}
{%- endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Like Nemotron 3's: what an answer said beside its calls loses its edges once a later question has come."""
SYSTEM_FIRST = TEMPLATE.replace(
    "{{ message.role }}",
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{{ message.role }}",
)
"""Takes no system message but the first."""
ARGUED = """{{ reasoning_effort if reasoning_effort in ["low", "high"] else "medium" }}""" + TEMPLATE.replace(
    "{{ call.function.name }}", "{{ call | tojson }}"
)
"""Writes calls as they are given, and the effort, if it is a usual one."""
REASONING = TEMPLATE.replace(
    "{%- for message in messages",
    """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages""",
    1,
).replace(
    "{{ message.content }}",
    "{% if message.reasoning_content and loop.index0 > ns.last %}<think>{{ message.reasoning_content }}</think>"
    "{% endif %}{{ message.content }}",
)
"""Like Qwen3's: the reasoning before the last question is dropped."""
DEVELOPERS = TEMPLATE + "{# 'developer' #}"
"""Takes the messages of developers as they are."""
INSTRUCTED_LAST = DEVELOPERS + "{% if messages[-1].role == 'developer' %}{{ messages | length }}{% endif %}"
"""Counts the messages of a chat that ends with an instruction."""
LONG_RULES = DEVELOPERS.replace(
    "{{ message.content }}",
    "{% if message.role == 'developer' %}{% if message.content | length < 50 %}{{ raise_exception('no') }}{% endif %}"
    "{{ loop.index }}{% endif %}{{ message.content }}",
)
"""Refuses the instructions that made-up chats have, and numbers longer ones."""
MARKED = TEMPLATE.replace(
    "{%- for message in messages",
    """{%- set ns = namespace(ruled="") %}
{%- for message in messages %}{% if message.role == "developer" %}{% set ns.ruled = "!" %}{% endif %}{% endfor %}
{%- for message in messages""",
    1,
).replace("{{ message.content }}", "{{ message.content }}{{ ns.ruled }}")
"""Writes every message otherwise where a developer has said something."""
NUMBERED = TEMPLATE.replace("{{ message.role }}", "{{ message.role }} {{ loop.index }}")
DATED = TEMPLATE + "{{ strftime_now('%d') }}"
PARTS = TEMPLATE.replace("{{ message.content }}", "{% for part in message.content %}{{ part.text }}|{% endfor %}")
"""Takes the parts of a message's content."""
TEMPLATES = {
    "parts": PARTS,
    "chatml": TEMPLATE,
    "thinking": THINKING,
    "system_last": SYSTEM_LAST,
    "numbered": NUMBERED,
    "trimmed": TRIMMED,
    "system_first": SYSTEM_FIRST,
    "dated": DATED,
    "argued": ARGUED,
    "reasoning": REASONING,
    "developers": DEVELOPERS,
}


class CountingEncoder(LocalEncoder):
    """Notes how much it is given."""

    given_chars = 0

    def encode(self, texts: list[str]) -> Encoded:
        self.given_chars += sum(map(len, texts))
        return super().encode(texts)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies of a few hundred bytes have several stretches and points."""
    monkeypatch.setattr(listed_json, "STRETCH_BYTES", STRETCH_BYTES)
    monkeypatch.setattr(known_bodies, "GRID_BYTES", STRETCH_BYTES)


@pytest.fixture(scope="session")
def encoder(model_folder: Path) -> CountingEncoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualmap.router.tokens.encoder._by_transformers", lambda folder: None)
        return CountingEncoder(model_folder)


@pytest.fixture(scope="session")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Replica:
    """Reads bodies, and tokenizes their prompts."""

    def __init__(self, encoder: CountingEncoder, template: str, threads: ThreadPoolExecutor) -> None:
        self.known = LongBodies(BodyBudget(1 << 30))
        self.encoder = encoder
        self.found: list[str] = []
        templates = templates_of({"default": template}, {}, {})
        files = PoolTokenizer(
            encoder, templates, threads=threads, timeout_s=20, max_bytes=1 << 20, count=self.found.append
        )
        self.tokenizer = VerifiedTokenizer(
            {FILES: files}, NoRenderer(), pool="p", view=ClusterView, clock=RealClock(), count=self.count,
            unrendered=print, miscounted=print,
        )  # fmt: skip

    def count(self, how: TokenizedHow) -> None:
        self.found.append(how)

    async def read(self, body: bytes, path: str = CHAT, *, tenant: Tenant = TENANT) -> tuple[bool, ReadPrompt | None]:
        """Whether it was read, and tokenized, as the continuation of a known chat, and the prompt."""
        try:
            sent = (await self.known.read(request_of(path, body, tenant), "id")).prompt
        except NotFoundError:  # it continues another tenant's response
            return False, None
        if sent is None:
            return False, None
        whole, wholes = sent.whole, []

        def read_whole() -> SentPrompt:
            assert whole is not None
            wholes.append(whole())
            return wholes[0]

        sent.whole = read_whole
        found = await read_prompt(sent, model="m", lora=None, rule=RULE, learned=Learned(), tokenizer=self.tokenizer)
        return isinstance(sent.prompt, ContinuedChat) and not wholes, found


class NoRenderer:
    async def chain(self, sent: SentPrompt, *, lora: str | None, block_tokens: int) -> Any:
        return Unrendered.OFF

    async def close(self) -> None: ...


def shown(found: ReadPrompt | None) -> Any:
    if found is None:
        return None
    chain = found.chain
    fields = (tuple(chain.hashes), chain.tail_hash, chain.prompt_tokens, chain.block_tokens, chain.key_stride)
    return fields, found.text_bytes, found.expected_output_tokens, found.output_limit, found.count


TEXTS = st.sampled_from(
    ["", "a", " b\n", "\n\nc", "é 你好", "<tool_response>x</tool_response>", "why</think> d", "<|im_end|>", "x " * 40]
)
CALLS = st.lists(
    st.builds(
        lambda text: {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}},
        TEXTS,
    ),
    max_size=2,
)
TURNS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda calls, text: {"role": "assistant", "content": text or None, "tool_calls": calls}, CALLS, TEXTS),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "c", "content": text}, TEXTS),
    st.just({"role": "assistant", "content": "why</think> d"}),
    st.builds(
        lambda role, texts: {"role": role, "content": [{"type": "text", "text": text} for text in texts]},
        st.sampled_from(["user", "tool"]),
        st.lists(TEXTS, max_size=3),
    ),
    st.builds(
        lambda name, text: {"role": "assistant", "content": "x", name: text, "refusal": None},
        st.sampled_from(["reasoning", "reasoning_content"]),
        TEXTS,
    ),
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "developer"]), TEXTS),
)
PARAMETERS: tuple[dict[str, Any], ...] = (
    {}, {"parameters": {"type": "object", "properties": {}}}, {"parameters": {"properties": {}, "type": "object"}},
)  # fmt: skip
ARGUMENTS = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "tools": st.sampled_from([[{"type": "function", "function": {"name": "f", **each}}] for each in PARAMETERS]),
        "chat_template_kwargs": st.sampled_from([None, {"enable_thinking": False}, {"add_generation_prompt": False}]),
        "add_generation_prompt": st.booleans(), "continue_final_message": st.booleans(), "cache_salt": st.just("s"),
        "reasoning_effort": st.just("none"), "tool_choice": st.just("auto"), "max_tokens": st.just(5),
        "add_special_tokens": st.booleans(),
    },
)  # fmt: skip


BLOCKS = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
    st.builds(lambda text: {"type": "thinking", "thinking": text}, TEXTS),
    st.builds(lambda text: {"type": "tool_use", "id": "c", "name": "f", "input": {"a": text}}, TEXTS),
)
RESULTS = st.builds(
    lambda text: {"type": "tool_result", "tool_use_id": "c", "content": text},
    st.one_of(TEXTS, st.builds(lambda text: [{"type": "text", "text": text}], TEXTS)),
)
MESSAGE_TURNS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda blocks: {"role": "assistant", "content": blocks}, st.lists(BLOCKS, max_size=3)),
    st.builds(lambda results: {"role": "user", "content": results}, st.lists(RESULTS, max_size=2)),
    st.builds(
        lambda result, text: {"role": "user", "content": [result, {"type": "text", "text": text}]}, RESULTS, TEXTS
    ),
    st.builds(lambda result: {"role": "user", "content": [result]}, RESULTS),
    st.one_of(
        st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
        st.just({"role": "system", "content": [{"type": "tool_addition", "tool": {"definition": {"name": "g"}}}]}),
        st.just({"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}),
    ),
)
MESSAGE_ARGUMENTS = st.fixed_dictionaries(
    {"model": st.just("m"), "max_tokens": st.just(5)},
    optional={
        "tools": st.just([{"name": "f", "input_schema": {}}]), "system": TEXTS, "cache_salt": st.just("s"),
        "thinking": st.just({"type": "disabled"}),
        "output_config": st.sampled_from([{"effort": "low"}, {"effort": "none"}]),
        "chat_template_kwargs": st.just({"enable_thinking": False}),
    },
)  # fmt: skip
TEXT_PARTS = st.lists(
    st.builds(lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["input_text", "output_text"]), TEXTS),
    max_size=2,
)
CALL_ITEMS = st.one_of(
    st.builds(
        lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": text})}, TEXTS
    ),
    st.builds(lambda text: {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": text}, TEXTS),
)
RESPONSE_TURNS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(
        lambda role, parts: {"type": "message", "role": role, "content": parts},
        st.sampled_from(["user", "assistant"]),
        TEXT_PARTS,
    ),
    CALL_ITEMS,
    CALL_ITEMS,
    st.builds(
        lambda output: {"type": "function_call_output", "call_id": "c", "output": output}, st.one_of(TEXTS, TEXT_PARTS)
    ),
    st.builds(lambda text: {"type": "custom_tool_call_output", "call_id": "c", "output": text}, TEXTS),
    st.one_of(
        st.builds(lambda text: {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}, TEXTS),
        st.builds(lambda text: {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}, TEXTS),
        st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["system", "developer"]), TEXTS),
        st.builds(
            lambda status: {"type": "message", "role": "assistant", "status": status, "content": "x"},
            st.sampled_from(["incomplete", "completed"]),
        ),
        st.just({"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}),
    ),
)
RESPONSE_ARGUMENTS = st.fixed_dictionaries(
    {"model": st.just("m")},
    optional={
        "tools": st.sampled_from([[{"type": "function", "name": "f", **each}] for each in PARAMETERS]),
        "instructions": TEXTS, "cache_salt": st.just("s"), "reasoning": st.sampled_from([{"effort": "low"}, {}]),
        "chat_template_kwargs": st.just({"enable_thinking": False}), "max_output_tokens": st.just(5),
        "previous_response_id": st.just(response_id("x", "i", TENANT.name)),
    },
)  # fmt: skip
OF_PATH: dict[str, tuple[Any, Any]] = {
    CHAT: (TURNS, ARGUMENTS),
    MESSAGES: (MESSAGE_TURNS, MESSAGE_ARGUMENTS),
    RESPONSES: (RESPONSE_TURNS, RESPONSE_ARGUMENTS),
}


@st.composite
def agents_bodies(draw: st.DrawFn, path: str) -> list[bytes]:
    """Bodies of one agent, whose messages are mostly plain."""
    turns, arguments = OF_PATH[path]
    roles = ["user"] if path == MESSAGES else ["system", "developer", "user"]
    first = [{"role": draw(st.sampled_from(roles)), "content": draw(TEXTS)}]
    messages = [*first, {"role": "user", "content": draw(TEXTS)}, *draw(st.lists(turns, max_size=5))]
    shown, bodies = draw(arguments), []
    for _ in range(draw(st.integers(2, 5))):
        change = draw(st.integers(0, 9))
        if change == 0:
            place = draw(st.integers(0, len(messages) - 1))
            messages = [*messages[:place], draw(turns), *messages[place + 1 :]]
        elif change == 1:
            shown = draw(arguments)
        messages = [*messages, *draw(st.lists(turns, min_size=1, max_size=3))]
        bodies.append(json.dumps({NAMES[path]: messages, **shown}, separators=(",", ":")).encode())
    return bodies


@pytest.mark.parametrize("path", OF_PATH)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_chat_has_the_same_tokens_whatever_was_known(
    name: str, path: str, encoder: CountingEncoder, threads: ThreadPoolExecutor, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        first_ids, last_ids = data.draw(st.sampled_from([((), ()), ((0,), ()), ((0,), (1,))]))
        patch.setattr(encoder, "first_ids", first_ids)
        patch.setattr(encoder, "last_ids", last_ids)
        knowing = Replica(encoder, TEMPLATES[name], threads)
        for body in data.draw(st.one_of(bodies_of(path), agents_bodies(path), agents_bodies(path))):
            _, found = asyncio.run(knowing.read(body, path))
            _, whole = asyncio.run(Replica(encoder, TEMPLATES[name], threads).read(body, path))
            assert shown(found) == shown(whole)


def agent(steps: int, **last: Any) -> bytes:
    """A chat of an agent with so many calls of tools."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u " * 40}]
    for step in range(steps):
        call = {"id": f"c{step}", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": step})}}
        messages.append({"role": "assistant", "content": f"step {step}", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{step}", "content": f"result {step} " + "x " * 60})
    messages[-1] |= last
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    return json.dumps({"messages": messages, "model": "m", "tools": tools}, separators=(",", ":")).encode()


@pytest.mark.parametrize("name", ["chatml", "parts", "thinking"])
async def test_a_turn_of_an_agent_tokenizes_what_is_new(
    name: str, encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    replica = Replica(encoder, TEMPLATES[name], threads)
    assert (await replica.read(agent(8)))[0] is False
    for steps in range(9, 14):
        before = encoder.given_chars
        continued, found = await replica.read(agent(steps))
        assert continued
        assert encoder.given_chars - before < 300
        assert shown(found) == shown((await Replica(encoder, TEMPLATES[name], threads).read(agent(steps)))[1])


def agent_of_messages(steps: int) -> bytes:
    """A body of the messages API has the history of a chat."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "u " * 40}]
    for step in range(steps):
        call = {"type": "tool_use", "id": f"c{step}", "name": "f", "input": {"a": step}}
        result = {"type": "tool_result", "tool_use_id": f"c{step}", "content": f"result {step} " + "x " * 60}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"step {step}"}, call]})
        messages.append({"role": "user", "content": [result]})
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    body = {"messages": messages, "model": "m", "system": "s", "tools": tools, "max_tokens": 5}
    return json.dumps(body, separators=(",", ":")).encode()


def agent_of_responses(steps: int) -> bytes:
    """A body of the responses API has the history of a chat."""
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "u " * 40}]}]
    for step in range(steps):
        said = {"type": "output_text", "text": f"step {step}", "annotations": []}
        call = {"type": "function_call", "call_id": f"c{step}", "name": "f", "arguments": json.dumps({"a": step})}
        output = f"result {step} " + "x " * 60
        items.append({"type": "message", "role": "assistant", "status": "completed", "content": [said]})
        items += [call, {"type": "function_call_output", "call_id": f"c{step}", "output": output}]
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    body = {"input": items, "model": "m", "instructions": "s", "tools": tools}
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize(("path", "body_of"), [(MESSAGES, agent_of_messages), (RESPONSES, agent_of_responses)])
@pytest.mark.parametrize("name", ["chatml", "parts", "thinking", "system_first", "argued"])
async def test_a_turn_of_an_agent_over_another_api_tokenizes_what_is_new(
    name: str, path: str, body_of: Callable[[int], bytes], encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    await assert_later_turns_tokenize_what_is_new(TEMPLATES[name], path, body_of, encoder, threads)


async def assert_later_turns_tokenize_what_is_new(
    template: str, path: str, body_of: Callable[[int], bytes], encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    replica = Replica(encoder, template, threads)
    assert (await replica.read(body_of(8), path))[0] is False
    for steps in range(9, 12):
        before, body = encoder.given_chars, body_of(steps)
        continued, found = await replica.read(body, path)
        assert continued
        assert encoder.given_chars - before < 400
        assert shown(found) == shown((await Replica(encoder, template, threads).read(body, path))[1])


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}]},
         {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 2, "a": 1}}}]}),
        (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": {"a": 1, "b": 2}}]},
         {"tools": [{"type": "function", "name": "f", "parameters": {"b": 2, "a": 1}}]}),
        (MESSAGES, {"output_config": {"effort": "none"}}, {"thinking": {"type": "disabled"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"output_config": {"effort": "none"}}),
        (RESPONSES, {"instructions": "a"}, {"instructions": "b"}),
        (RESPONSES, {"instructions": "a"}, {}),
    ],
)  # fmt: skip
async def test_a_body_whose_template_is_given_something_else_is_tokenized_whole(
    path: str, before: dict[str, Any], after: dict[str, Any], encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    replica = Replica(encoder, TEMPLATES["argued"], threads)
    other = [{"role": "user", "content": "other " * 40}]
    items: list[dict[str, Any]] = [{"role": "user", "content": "u " * 40}]
    await replica.read(json.dumps({NAMES[path]: other, "model": "m", **after}).encode(), path)
    for fields in (before, after):
        body = json.dumps({NAMES[path]: items, "model": "m", **fields}, separators=(",", ":")).encode()
        continued, found = await replica.read(body, path)
        assert not continued
        assert shown(found) == shown((await Replica(encoder, TEMPLATES["argued"], threads).read(body, path))[1])
        items = [*items, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b " * 40}]


def codex(steps: int, *more: dict[str, Any], until: int | None = None) -> bytes:
    """A response has a developer's message before the question, and reasoning before each call; ``more`` items are
    behind so many steps (``until``), or behind all."""
    items: list[dict[str, Any]] = [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}
        for role, text in (("developer", "d " * 20), ("user", "u " * 20), ("user", "q " * 20))
    ]
    for step in range(steps):
        if step == until:
            items += more
        thought = [{"type": "reasoning_text", "text": f"thought {step}"}]
        items.append({"type": "reasoning", "summary": [], "content": thought, "encrypted_content": None})
        items.append({"type": "function_call", "call_id": f"c{step}", "name": "f", "arguments": '{"a": 1}'})
        output = f"result {step} " + "x " * 60
        items.append({"type": "function_call_output", "call_id": f"c{step}", "output": output})
    items += more if until is None else ()
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    body = {"input": items, "model": "m", "instructions": "s", "tools": tools}
    return json.dumps(body, separators=(",", ":")).encode()


def instruction(role: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": "new rules"}]}


QUESTION = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "and now?"}]}


@pytest.mark.parametrize("name", ["chatml", "reasoning", "developers"])
async def test_a_turn_with_reasoning_behind_a_developers_message_tokenizes_what_is_new(
    name: str, encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    await assert_later_turns_tokenize_what_is_new(TEMPLATES[name], RESPONSES, codex, encoder, threads)


@pytest.mark.parametrize(
    ("name", "more", "continues"),
    [
        ("chatml", [QUESTION], True),
        ("reasoning", [QUESTION], False),
        ("chatml", [instruction("developer"), QUESTION], False),
        ("developers", [instruction("developer"), QUESTION], True),
        ("developers", [instruction("system"), QUESTION], True),
        ("reasoning", [instruction("developer")], False),
    ],
)
async def test_a_question_or_an_instruction_continues_where_the_template_keeps_what_is_before_it(
    name: str, more: list[dict[str, Any]], continues: bool, encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    """The first of a kind is rendered whole in any case: templates are compared with it then."""
    replica = Replica(encoder, TEMPLATES[name], threads)
    for question in (codex(4, *more), codex(5)):
        await replica.read(question, RESPONSES)
    for body, expected in ((codex(5, *more), continues), (codex(6, *more, until=5), more[-1] is QUESTION)):
        continued, found = await replica.read(body, RESPONSES)
        assert continued is expected
        assert shown(found) == shown((await Replica(encoder, TEMPLATES[name], threads).read(body, RESPONSES))[1])


async def test_a_response_that_ends_with_a_part_of_an_answer_is_tokenized_whole(
    encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    """The next item may become a part of it, too."""
    replica = Replica(encoder, TEMPLATES["chatml"], threads)
    call = {"type": "function_call", "call_id": "d", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "d", "output": "x " * 40}
    for behind, continues in (([call], False), ([call, call, output], False), ([call, call, output, call], True)):
        body = json.loads(agent_of_responses(8))
        body["input"] += behind
        sent = json.dumps(body, separators=(",", ":")).encode()
        continued, found = await replica.read(sent, RESPONSES)
        assert continued is continues
        assert shown(found) == shown((await Replica(encoder, TEMPLATES["chatml"], threads).read(sent, RESPONSES))[1])


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("system_last", {}),
        ("numbered", {}),
        ("dated", {}),
        ("thinking", {"content": "a </think> b"}),
        ("thinking", {"reasoning": "why"}),
        ("chatml", {"name": "n"}),
        ("thinking", {"content": [{"type": "text", "text": "a </think> b"}]}),
        ("chatml", {"content": [{"type": "text", "text": "a", "cache_control": {}}]}),
    ],
)
async def test_a_chat_that_a_template_may_not_split_is_tokenized_whole(
    name: str, last: dict[str, Any], encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    replica = Replica(encoder, TEMPLATES[name], threads)
    for steps in (8, 9, 10):
        continued, _ = await replica.read(agent(steps, **last))
        assert not continued


async def test_a_chat_with_other_tools_or_for_another_tokenizer_is_tokenized_whole(
    encoder: CountingEncoder, threads: ThreadPoolExecutor
) -> None:
    replica, other = Replica(encoder, TEMPLATE, threads), Replica(encoder, THINKING, threads)
    await replica.read(agent(8))
    changed = agent(9).replace(b'"name":"f","parameters"', b'"name":"g","parameters"')
    assert (await replica.read(changed))[0] is False
    other.known = replica.known
    _, found = await other.read(agent(10))
    assert shown(found) == shown((await Replica(encoder, THINKING, threads).read(agent(10)))[1])


def test_roles_between_which_a_template_writes_more_are_no_split() -> None:
    """Results of tools that follow each other are one message there."""
    splits = SplitChats(ChatTemplate(THINKING, {}, {}))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "d"}
    assert splits.opening({"messages": [*chat, result]}) == (ChatShape("tool"), "<|im_start|>assistant\n")
    assert splits.tail({"messages": [result]}, ChatShape("tool")) is None
    tail = splits.tail({"messages": [{"role": "user", "content": "e"}]}, ChatShape("tool"))
    assert tail is not None
    assert tail.text == "<|im_start|>usere<|im_end|>\n<|im_start|>assistant\n"
    assert splits.tail({"messages": [{"role": "user", "content": "e"}]}, ChatShape("assistant")) is None


def test_a_template_that_rewrites_answers_once_a_question_comes_splits_where_none_does() -> None:
    splits = SplitChats(ChatTemplate(TRIMMED, {}, {}))
    answer = {"role": "assistant", "content": "b"}
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}, {**answer, "tool_calls": [CALL]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "d"}

    for messages in (chat, [*chat, result], [*chat, result, answer], [*chat, result, answer, chat[0]]):
        assert splits.opening({"messages": messages}) == (ChatShape(messages[-1]["role"]), "<|im_start|>assistant\n")
    assert splits.tail({"messages": [chat[1], result]}, ChatShape("tool")) is not None
    assert splits.tail({"messages": [answer, chat[0]]}, ChatShape("tool")) is None
    assert splits.tail({"messages": [chat[0]]}, ChatShape("assistant")) is None
    assert splits.tail({"messages": [answer, chat[0]]}, ChatShape("user")) is not None


def test_arguments_that_are_always_others_are_compared_no_more_than_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare takes longer than to render a chat whole, and a client can send what arguments it likes."""
    monkeypatch.setattr(split_chats, "_MAX_RULES", 5)
    monkeypatch.setattr(split_chats, "_MAX_RULES_OF_TENANT", 3)
    now_s = 0.0
    splits = SplitChats(ChatTemplate(TEMPLATE, {}, {}), now_s=lambda: now_s)
    messages = [{"role": "user", "content": "a"}]

    def is_split(number: int, tenant: str = "one") -> bool:
        body = {"messages": messages, "chat_template_kwargs": {"x": number}}
        return splits.opening(body, tenant=tenant) is not None

    assert [is_split(number) for number in range(5)] == [True, True, True, False, False]
    assert is_split(0)
    now_s = 30.0
    assert [is_split(number, "two") for number in (0, 10, 11, 12)] == [True, True, True, False], "others have room left"
    assert splits.opening({"messages": messages}, tenant="one") is not None, "chats without arguments are few"
    now_s = 61.0
    assert [is_split(number) for number in range(4, 8)] == [True, True, True, False]
    assert [is_split(number, "two") for number in (10, 11, 12)] == [True, True, False], "each is kept for its time"
    now_s = 91.0
    assert is_split(12, "three")
    assert splits.opening({"messages": messages}) is not None


async def test_kinds_of_chats_that_one_tenant_has_compared_leave_room_for_those_of_others(
    encoder: CountingEncoder, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_chats, "_MAX_RULES_OF_TENANT", 1)
    replica = Replica(encoder, TEMPLATE, threads)

    async def continues(number: int, tenant: Tenant) -> bool:
        """Whether a second turn, with these arguments, continues from the first."""
        for steps in (8, 9):
            body = json.dumps(
                {**json.loads(agent(steps)), "chat_template_kwargs": {"x": number}}, separators=(",", ":")
            )
            continued, _ = await replica.read(body.encode(), tenant=tenant)
        return continued

    assert [await continues(number, TENANT) for number in (1, 2)] == [True, False]
    assert await continues(3, replace(TENANT, name="other"))


def test_a_template_for_which_instructions_before_the_split_count_splits_chats_without_any_alone() -> None:
    splits = SplitChats(ChatTemplate(MARKED, {}, {}))
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}

    assert splits.opening({"messages": [question]}) == (ChatShape("user"), "<|im_start|>assistant\n")
    assert splits.tail({"messages": [answer, question]}, ChatShape("user")) is not None
    splits.opening({"messages": [{"role": "developer", "content": "rules"}, question]})
    assert splits.tail({"messages": [answer, question]}, ChatShape("user", frozenset({"developer"}))) is None


def test_chats_that_end_with_an_instruction_say_nothing_of_those_that_go_on_behind_it() -> None:
    """They are never split: a template may treat a last instruction as it likes."""
    splits = SplitChats(ChatTemplate(INSTRUCTED_LAST, {}, {}))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}, *STEP]
    behind = [{"role": "developer", "content": "rules"}, *STEP]

    assert splits.opening({"messages": [*chat, *behind]}) is not None
    assert splits.tail({"messages": behind}, ChatShape("tool")) is not None


def test_chats_without_an_instruction_behind_the_split_say_nothing_of_those_with_one() -> None:
    splits = SplitChats(ChatTemplate(LONG_RULES, {}, {}))
    chat: list[dict[str, Any]] = [{"role": "user", "content": "a"}, *STEP]
    behind = [*STEP, {"role": "developer", "content": "rules " * 20}, *STEP]

    splits.opening({"messages": [*chat, *behind]})
    assert splits.tail({"messages": behind}, ChatShape("tool")) is None


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
STEP = (
    {"role": "assistant", "content": "b", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "d"},
)
