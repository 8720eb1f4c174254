"""Feeds an extension bodies that are nearly plain, and compares what it reads with Python's reading of the whole body.

``python -m tests.api_bodies.fuzz_plain_list`` with the path of an extension and a number of bodies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random
from typing import Any, Final

from dualmap.api_bodies.errors import PromptError
from dualmap.api_bodies.json_body import read_json
from dualmap.api_bodies.listed_json import items_begin, next_item, read_frame
from dualmap.api_bodies.messages_api import chat_of_message
from dualmap.api_bodies.plain_list import NAMES, Api, plain_items, plain_list
from dualmap.api_bodies.prompt import chat_prompt
from dualmap.api_bodies.responses_api import chat_of_response
from dualmap.scheduling.prompts.blocks import TextPrompt
from tests.support.sanitized import loaded

ONLY: Final = "what no client guesses"
TEXTS: Final = (
    "", "a", "hi there", "x" * 15, "x" * 16, "x" * 17, "y" * 70, "日本語 — é", "😀", "\x00", "\u2028\x7f",
    "a\nb\t\"c\"\\d/",
    "x-anthropic-billing-header: 1\nrest", "é" * 20, "\U0010ffff\ud7ff\ue000\uffff\u0800\u07ff", '"},{"role":"user"',
)  # fmt: skip
ROLES: Final = ("user", "assistant", "system", "tool", "developer", "other", "", "rôle", "user")
KINDS: Final = ("text", "input_text", "output_text", "image_url", "refusal", "text")
VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, -1, 1.5, 1e300, 2**63, 2**70, [], {}, "x", [1, [2, {"a": None}]], {"b": {"c": "é\n"}},
    {"z": 1, "a": {"b": [{"y": "\x01\x1f\n\t/\x7f"}, "é"], "": None, "aa": False}, "B": "\\"},
    {str(n): n for n in range(70)},
    {"type": "ephemeral"}, [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
)  # fmt: skip
NAMES_OF_FIELDS: Final = (
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "type",
    "id",
    "status",
    "x",
    "cache_control",
)
RAW: Final = (
    b'"', b"\\", b"\\u", b"\\u00e9", b"\\ud83d", b"\\ude00", b"\\ud83d\\ude00", b"\\uD800", b"\\u:@`g", b"\\/", b"\\x",
    b"\x00", b"\x1f", b"\x7f", b"\xc0\x80", b"\xc2", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f",
    b"\xff", b"{", b"}", b"[", b"]", b",", b":", b" ", b"\n", b"0", b"1e5", b"-", b"01", b"1.", b"nul", b"null", b"NaN",
    b'"a":-0,', b'"a":"\\/\\u0041\\u0007\\u00e9",', b'"role":"user",', b'"content":"again",',
    b'"r\\u006fle":"x",', b'"x":1,"x":2,', b'{"role":"user"},',
    b"\xef\xbb\xbf",
)  # fmt: skip


def part(random: Random) -> Any:
    if random.random() < 0.05:
        return random.choice(("plain", None, 7, {}, []))
    fields = [("type", random.choice(KINDS)), ("text", random.choice(TEXTS))]
    if random.random() < 0.2:
        fields.append((random.choice(NAMES_OF_FIELDS), random.choice(VALUES)))
    random.shuffle(fields)
    return dict(fields[: random.choice((1, 2, 3, 3, 3, 3))])


def plain_message(random: Random) -> Any:
    content: Any = random.choice(TEXTS)
    if random.random() < 0.3:
        content = [{"type": "text", "text": random.choice(TEXTS)} for _ in range(random.choice((1, 1, 2)))]
    fields = [("role", random.choice(ROLES)), ("content", content)]
    if random.random() < 0.2:
        fields.append((random.choice(NAMES_OF_FIELDS), random.choice(VALUES)))
    random.shuffle(fields)
    return dict(fields)


def message(random: Random) -> Any:
    if random.random() < 0.7:
        return plain_message(random)
    if random.random() < 0.02:
        return random.choice(("plain", None, 7, {}, []))
    content: Any = random.choice(TEXTS)
    if random.random() < 0.3:
        content = [part(random) for _ in range(random.choice((0, 1, 1, 2, 3)))]
    elif random.random() < 0.05:
        content = random.choice(VALUES)
    fields = [("role", random.choice(ROLES)), ("content", content)]
    for _ in range(random.choice((0, 0, 0, 0, 1, 2))):
        fields.append((random.choice(NAMES_OF_FIELDS), random.choice(VALUES)))
    if random.random() < 0.3:
        random.shuffle(fields)
    if random.random() < 0.05:
        fields.pop(random.randrange(len(fields)))
    return dict(fields)


def body_of(random: Random, name: str) -> bytes:
    """A body that is nearly plain."""
    fields: list[tuple[str, Any]] = [
        ("model", "m"),
        (name, [message(random) for _ in range(random.choice((0, 1, 1, 2, 2, 5)))]),
    ]
    for each in ("tools", "system", "instructions", "stream", "metadata", "messages"):
        if random.random() < 0.15:
            fields.append((each, random.choice((*VALUES, *TEXTS[:4], {name: [{"role": "user"}]}))))
    random.shuffle(fields)
    separators = random.choice(((",", ":"), (", ", ": "), (" ,\n\t", "\r\n : ")))
    text = json.dumps(dict(fields), ensure_ascii=random.random() < 0.5, separators=separators)
    body = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 4))):
        place = random.randrange(len(body) + 1)
        body[place : place + random.choice((0, 0, 1, 2, 6))] = random.choice(RAW)
    return bytes(body[: random.randrange(len(body) + 1)] if random.random() < 0.05 else body)


def is_read_right(extension: Any, body: bytes, api: Api) -> bool:
    """Whether the body was read; what was read of it is what Python reads."""
    found = plain_list(body, api, b'"%b"' % ONLY.encode(), native=extension)
    if found is None:
        return False
    name = NAMES[api]
    assert _is_read_alike_by_places(extension, body, api, found.text)
    try:
        fields = read_frame(found.frame, name, ONLY)
        head = _prompt(api, {**fields, name: [{"role": "user", "content": ""}]})
    except (ValueError, PromptError):
        return False  # it is left to others, whatever the messages are
    if head.unread:
        return False
    whole = read_json(body)
    assert {**fields, name: whole[name]} == whole
    prompt = _prompt(api, whole)
    assert not prompt.unread and prompt.media_at is None
    assert prompt.data == head.data.removesuffix(b"\xffuser\xfe") + found.text
    return True


def _is_read_alike_by_places(extension: Any, body: bytes, api: Api, text: bytes) -> bool:
    begin = items_begin(body, NAMES[api])
    for stretch_bytes in (1, 100, 1 << 20):
        found = plain_items(body, begin, stretch_bytes, api, native=extension)
        if found is None or found[0] != text or found[1][-1].written != len(text):
            return False
        for place in found[1][:-1]:  # each is behind a message: the rest is read from the next one on
            at = next_item(body, place.end)
            rest = None if at is None else plain_items(body, at, 1 << 20, api, native=extension)
            if rest is None or text[: place.written] + rest[0] != text:
                return False
    return True


def _prompt(api: Api, body: Any) -> TextPrompt:
    if api is Api.MESSAGES:
        body = chat_of_message(body)
    elif api is Api.RESPONSES:
        body = chat_of_response(body)
    return chat_prompt(body)


def main(path: str, bodies: str) -> None:
    extension, random, read = loaded(Path(path)), Random(1), 0
    for number in range(int(bodies)):
        api = Api(number % len(Api))
        body = body_of(random, NAMES[api])
        try:
            read += is_read_right(extension, body, api)
        except Exception as error:
            raise AssertionError(f"{api!r} {body!r}") from error
    print(read)


if __name__ == "__main__":
    main(*sys.argv[1:])
