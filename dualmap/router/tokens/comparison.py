"""Texts in which tokenizers and chat templates differ, counted by the fleet and by an instance.

Pre-tokenizers differ in runs of whitespace, digits, contractions and scripts; normalizers in composed characters;
special tokens in whether they are found inside a text, and in what is added around it. Templates differ in how they
write turns, parts, tools and their results.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from dualmap.router.prompts.inference_request import TokenSource
from dualmap.router.prompts.prompt import sent_prompt
from dualmap.router.tokens.instance_client import TokenizeError
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.values import value

log = logging.getLogger(__name__)

_TEXTS: Final = (
    "def f(x):\n    return x + 1  # it's\n\n\n\tif x: pass\r\n\r\n   \t  trailing   \n \n",
    "  leading, He said: \"we'll see\" — I'M, DON'T; 12345 6.7e8, 100% of ½ 1234567890",
    "Größe naïve e\u0301 ﬁ Ⅷ Å 你好，世界。こんにちは 안녕 привет שלום मन्दिर ไทย \u00a0\u2003x\u200by\ufeff\u3000",
    "🙂👩\u200d👩\u200d👧🏽 ∑∂∞ \x7f\x00\x1b[0m \U0001d54f",
    '{"a": [1, 2.5, -3e10, null], "b": "\\u00e9\\n"}<html>&amp;</html> snake_case camelCase XMLHttpRequest2',
    "<|im_start|>user\n<|im_end|> <|endoftext|></s><s>[INST]x[/INST]<|eot_id|><|begin_of_text|><think>\n</think><pad>",
    "a" * 60 + " " + "1" * 30 + "!" * 30 + " " * 40 + "\n" * 10 + "\t" * 10 + "=" * 80,
)
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads — a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "é", "n": 1}'}}
_SYSTEM: Final = {"role": "system", "content": "You help.\n"}
_QUESTION: Final = {"role": "user", "content": "  What's in a.py?\n"}
_TURNS: Final = (_QUESTION, {"role": "assistant", "content": "Nothing. "}, {"role": "user", "content": "And b.py?"})
_PARTS: Final = ({"type": "text", "text": "What's"}, {"type": "text", "text": "in it?"})
_RESULT: Final = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "one\ntwo"}]}
_CHATS: Final[tuple[dict[str, Any], ...]] = (
    {"messages": [_QUESTION]},
    {"messages": [_SYSTEM, *_TURNS]},
    {"messages": [{"role": "user", "content": list(_PARTS)}]},
    {"messages": [_SYSTEM, _QUESTION], "tools": [_TOOL]},
    {
        "messages": [_QUESTION, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _RESULT],
        "tools": [_TOOL],
    },
)


class SourceTokenizer(Protocol):
    """Token ids of a prompt, whole; None where they cannot be had."""

    async def ids(self, source: TokenSource) -> array[int] | None: ...


class RemoteTokenizer(Protocol):
    async def ids(self, source: TokenSource, url: str) -> array[int] | None: ...


@value
class Compared:
    """One text that both have tokenized."""

    source: TokenSource
    own_tokens: int
    instance_tokens: int
    agreed: bool

    @property
    def is_chat(self) -> bool:
        return "messages" in self.source.fields


async def compare(
    own: SourceTokenizer, instances: RemoteTokenizer, instance: InstanceSpec
) -> tuple[Compared, ...] | None:
    """All texts that both can tokenize; None if the instance does not tokenize at all."""
    found = []
    for source in _sources():
        ids = await own.ids(source)
        if ids is None:  # no template, or one that refuses this
            continue
        try:
            theirs = await instances.ids(source, instance.url)
        except TokenizeError as error:
            log.info("%s does not tokenize, so that nothing is compared with it: %s", instance.instance_id, error)
            return None
        if theirs is not None:
            found.append(Compared(source, len(ids), len(theirs), ids == theirs))
    return tuple(found)


def _sources() -> Iterator[TokenSource]:
    bodies: list[tuple[str, Mapping[str, Any]]] = [("/v1/completions", {"prompt": text}) for text in _TEXTS]
    bodies += [("/v1/chat/completions", body) for body in _CHATS]
    for path, body in bodies:
        sent = sent_prompt(path, body)
        if sent is not None and sent.source is not None:
            yield sent.source
