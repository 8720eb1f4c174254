"""Whatever a body holds, it is read or refused: nothing else may come of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.simulation.emulator.errors import ApiError
from dualmap.simulation.emulator.generation_request import GenerationRequest, Limits
from dualmap.simulation.emulator.messages_api import read_message
from dualmap.simulation.emulator.openai_api import read_chat, read_completion
from dualmap.simulation.emulator.pooling_api import PoolingReply, read_embedding, read_rerank, read_score
from dualmap.simulation.emulator.replies import Ended, Reply, Stamp, Usage
from dualmap.simulation.emulator.responses_api import read_response
from dualmap.simulation.emulator.served_names import ServedNames

LIMITS = Limits(names=ServedNames("m"), max_model_len=200, block_tokens=4, mean_output_tokens=8, seed=0)
STAMP = Stamp("id", "m", 1, "f")
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 3, "format": "date"},
        "b": {"type": ["integer"], "minimum": 1, "exclusiveMaximum": 3},
        "c": {"type": "array", "items": {"$ref": "#/properties/a"}, "minItems": 1, "prefixItems": [{"enum": [1]}]},
        "d": {"anyOf": [{"const": 1}], "allOf": [{"properties": {}, "required": ["e"]}]},
    },
    "required": ["a"],
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
BODIES: list[tuple[Callable[..., tuple[GenerationRequest, Reply]], dict[str, Any]]] = [
    (
        read_chat,
        {
            "messages": MESSAGES,
            "max_tokens": 3,
            "n": 2,
            "stop": ["x"],
            "logprobs": True,
            "top_logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "structured_outputs": {"choice": ["a"]},
            "temperature": 1,
            "cache_salt": "s",
        },
    ),
    (read_completion, {"prompt": ["a", "b"], "max_tokens": 3, "echo": True, "logprobs": 1, "min_tokens": 1}),
    (
        read_response,
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "instructions": "be",
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "f"},
            "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_output_tokens": 3,
        },
    ),
    (
        read_message,
        {
            "model": "m",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 3,
            "system": "be",
            "stop_sequences": ["x"],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "f"},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (read_embedding, {"input": ["a", "b"], "encoding_format": "base64", "dimensions": None}),
    (read_rerank, {"query": "q", "documents": ["a", "b"], "top_n": 1}),
    (read_score, {"text_1": "a", "text_2": ["b", "c"]}),
]
ODD = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -1, 7, 10**9, 2**63, 1e30, 0.5, "", "x", "auto", "required", "#/a", "ü"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "name", "function", "schema", "$ref", "enum", "allOf"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, each in inner for path in paths_in(each, (*at, key)))]


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


@pytest.mark.parametrize(("read", "body"), BODIES)
@settings(max_examples=60)
@given(data=st.data())
def test_a_body_with_something_odd_in_it_is_read_or_refused(
    read: Callable[..., tuple[GenerationRequest, Reply]], body: dict[str, Any], data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(paths_in(body)[1:]))
    with contextlib.suppress(ApiError):
        ask, reply = read(replaced(body, path, data.draw(ODD)), LIMITS, STAMP)
        ends = [Ended(choice.script.tokens, choice.script.finish_reason) for choice in ask.choices]
        usage = Usage(ask.prompt_tokens, sum(end.tokens for end in ends), 0)
        assert reply.whole(ends, usage)
        if not isinstance(reply, PoolingReply):
            stream: Any = reply
            pieces = [stream.opening(), stream.begin(), *(stream.delta(at, 0, 1) for at in range(len(ends)))]
            pieces += [stream.end(at, 1, ended) for at, ended in enumerate(ends)]
            assert all(isinstance(piece, bytes) for piece in pieces)
            assert stream.closing(ends, usage)
        assert all(1 <= choice.prompt.tokens + choice.script.tokens <= LIMITS.max_model_len for choice in ask.choices)
