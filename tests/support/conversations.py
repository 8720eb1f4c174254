"""Conversations as clients send them, in the JSON of three APIs, and all that is read of a request."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from dualmap.router.errors import RouterError
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import InferenceRequest, SentPrompt
from dualmap.router.prompts.prompt import ReadPrompt, read_prompt
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.prompts.blocks import BlockRule
from dualmap.scheduling.tenants.budgets import Limit, Measure, Period
from dualmap.scheduling.tenants.tenant import Caller, Tenant

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RULE = BlockRule(4, 16)
TENANT = Tenant("acme", limits=(Limit(Measure.TOKENS, Period.MINUTE, 10),), models=frozenset({"m"}))


def request_of(path: str, body: bytes, tenant: Tenant | None = TENANT) -> ClientRequest:
    request = ClientRequest("POST", path, b"", [], http_10=False, keep_alive=True, body=body)
    request.caller = None if tenant is None else Caller(tenant, "ci")
    return request


async def chain_of(sent: SentPrompt | None, model: str = "m") -> ReadPrompt | None:
    if sent is None:
        return None
    return await read_prompt(sent, model=model, lora=None, rule=RULE, learned=Learned())


Seen = tuple[dict[str, Any], ReadPrompt | None] | str


async def seen(read: Callable[[], Any]) -> Seen:
    """All of a request that was read, or the refusal."""
    try:
        request = read()
        request = request if isinstance(request, InferenceRequest) else await request
    except RouterError as error:
        return f"{type(error).__name__}: {error}"
    values = {each.name: getattr(request, each.name) for each in fields(request)}
    sent = values.pop("prompt")
    if sent is not None:
        values |= {"salt": sent.salt, "teaches": sent.teaches, "limit": sent.output_limit, "size": sent.text_bytes}
    return values, await chain_of(sent)


# conversations ---------------------------------------------------------------------------------------------------
TEXTS = st.sampled_from(
    ["", "short", 'he said "},{"', '"}],"model":"x"}', "},{", "日本語 — é", "a" * 70, "line\nend\t\\u0041"]
)
VALUES = st.sampled_from([None, 1, "x", [], {}, [{"a": 1}, {"b": "},{"}], {"messages": [{"role": "user"}]}])
PARTS = st.lists(
    st.one_of(
        st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
        st.just("plain"),
    ),
    max_size=3,
)
ODD_PARTS = st.sampled_from([[{"type": "image_url", "image_url": {"url": "u"}}], [{"type": "odd", "text": 1}]])
CALLS = st.builds(
    lambda text: [{"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}],
    TEXTS,
)
CHAT_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "system", "tool"]), TEXTS),
    st.builds(lambda parts: {"role": "user", "content": parts}, PARTS),
    st.builds(lambda calls, text: {"role": "assistant", "content": text, "tool_calls": calls}, CALLS, TEXTS),
    st.builds(lambda more: {"role": "assistant", "content": "x", "extra": more}, VALUES),
    st.builds(lambda parts, text: {"role": "user", "content": text or parts}, ODD_PARTS, TEXTS),
)
MESSAGE_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda text: {"role": "user", "content": [{"type": "tool_result", "content": text}]}, TEXTS),
    st.builds(lambda text: {"role": "assistant", "content": [{"type": "tool_use", "input": {"a": text}}]}, TEXTS),
    st.builds(lambda text: {"role": "system", "content": text}, TEXTS),
    st.just({"role": "system", "content": [{"type": "tool_removal", "tool": {"name": "t0"}}]}),
    st.just({"role": "user", "content": []}),
)
RESPONSE_ITEMS = st.one_of(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), TEXTS),
    st.builds(lambda text: {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}, TEXTS),
    st.builds(lambda text: {"type": "function_call_output", "call_id": "c", "output": text}, TEXTS),
    st.builds(lambda text: {"type": "reasoning", "content": [{"text": text}]}, TEXTS),
    st.just({"type": "message", "role": "assistant", "status": "incomplete", "content": "x"}),
)
ITEMS = {CHAT: CHAT_ITEMS, MESSAGES: MESSAGE_ITEMS, RESPONSES: RESPONSE_ITEMS}
NAMES = {CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}
TOOLS = st.sampled_from([None, [], [{"name": "t0"}], [{"name": "t0"}, {"name": "t1"}], "no list"])
FIELDS = st.fixed_dictionaries(
    {"model": st.sampled_from(["m", "other", 1])},
    optional={
        "tools": TOOLS, "system": TEXTS, "instructions": TEXTS, "stream": st.booleans(), "max_tokens": st.just(5),
        "n": st.sampled_from([1, 2]), "cache_salt": TEXTS, "stream_options": st.none(), "priority": st.just(1),
        "kv_transfer_params": st.just({"a": 1}), "previous_response_id": st.sampled_from(["resp_x~t0@i", "resp_y@i"]),
        "store": st.booleans(),
    },
)  # fmt: skip
GARBAGE = st.sampled_from(
    [b"", b" ", b"}", b',"messages":[{"role":"user","content":"other"}]}', b',"inpu\\u0074":[]}', b',"model":"again"}',
     b',"m\\u006fdel":"escaped"}', b',"x":NaN}', b',"x":"\\ud800"}', b',"x":"\xff"}', b',"n":2,"n":3}']
)  # fmt: skip
"""The end of a body, in place of its last brace."""


@st.composite
def bodies_of(draw: st.DrawFn, path: str) -> list[bytes]:
    """Bodies of one client: a conversation that grows, is edited and is sent in other words."""
    items = draw(st.lists(ITEMS[path], min_size=2, max_size=8))
    shown, compact, ascii_only, first, bodies = draw(FIELDS), True, True, False, []
    for _ in range(draw(st.integers(3, 6))):
        change = draw(st.integers(-6, 11))
        if change <= 5:
            items = [*items, *draw(st.lists(ITEMS[path], min_size=1, max_size=4))]
        elif change == 6:
            place = draw(st.integers(0, len(items) - 1))
            items = [*items[:place], draw(ITEMS[path]), *items[place + 1 :]]
        elif change == 7:
            items = items[: draw(st.integers(0, len(items)))] or items
        elif change == 8:
            shown = draw(FIELDS)
        elif change == 9:
            first = not first
        elif change == 10:
            compact = not compact
        else:
            ascii_only = not ascii_only
        listed = {NAMES[path]: items}
        body = {**shown, **listed} if first else {**listed, **shown}
        text = json.dumps(body, ensure_ascii=ascii_only, separators=(",", ":") if compact else (" , ", " :\n"))
        raw = text.encode("utf-8", "surrogatepass")
        bodies.append(raw[:-1] + (draw(GARBAGE) if draw(st.integers(0, 9)) == 0 else b"}"))
    return bodies
