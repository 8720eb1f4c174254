"""Answers of scripted instances that are as they should be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from tests.router.http import kit
from tests.router.http.kit import Client, Instance, Talk

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


async def whole_answer(talk: Talk) -> None:
    await talk.answer({"object": "chat.completion", "usage": USAGE})


async def whole_stream(talk: Talk) -> None:
    await talk.begin_stream()
    await talk.role()
    await talk.token("a")
    await talk.token("b")
    await talk.event({"choices": [], "usage": USAGE})
    await talk.end_stream()


def events(body: bytes) -> list[Any]:
    """The events of a stream that are JSON and have no name."""
    return [orjson.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b"data: {")]


StartFleet = Callable[..., Awaitable[tuple[kit.Intake, list[Instance], Client]]]
USAGE_EVENT = {"id": "c", "choices": [], "usage": USAGE}
