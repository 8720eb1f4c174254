"""Instances are asked where they publish, in the background."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.workers.kv_events.asked_sources import KNOWN_S, UNKNOWN_S, AskedSources
from dualmap.workers.kv_events.source import EventSource, source_said
from dualmap.workers.probe import NotSentError
from tests.support.manual_clock import ManualClock

SPEC = InstanceSpec("a", "http://10.0.0.1:8000")
SAID = {
    "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:27100", "replay_endpoint": "tcp://*:27200",
    "buffer_steps": 10000, "topic": "kv@a",
}  # fmt: skip
SOURCE = EventSource("a", "tcp://10.0.0.1:27100", "tcp://10.0.0.1:27200", "kv@a")


class Server:
    """Answers by URL; counts the questions."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked = 0

    async def kv_event_sources(self, url: str) -> Any:
        self.asked += 1
        answer = self.answers.get(url)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_instance_is_followed_where_it_says_that_it_publishes() -> None:
    server, clock = Server(), ManualClock()
    asked = AskedSources(server, clock)
    first = asked.of([SPEC])
    await settled()
    server.answers[SPEC.url] = {"0": SAID}
    clock.now_s += UNKNOWN_S
    again = asked.of([SPEC])
    await settled()

    assert (first, again, asked.of([SPEC]), server.asked) == ({}, {}, {"a": SOURCE}, 2)


async def test_one_that_answers_no_more_keeps_its_source_and_one_that_moves_is_asked_again() -> None:
    server, clock = Server(), ManualClock()
    asked = AskedSources(server, clock)
    server.answers[SPEC.url] = {"0": SAID}
    asked.of([SPEC])
    await settled()
    for answer in (None, NotSentError()):
        server.answers[SPEC.url] = answer
        clock.now_s += KNOWN_S
        asked.of([SPEC])
        await settled()
    kept = asked.of([SPEC])
    server.answers[SPEC.url] = {"0": SAID | {"endpoint": "tcp://*:1"}}
    clock.now_s += KNOWN_S
    asked.of([SPEC])
    await settled()
    moved = asked.of([SPEC])

    assert (kept, moved["a"].endpoint) == ({"a": SOURCE}, "tcp://10.0.0.1:1")
    assert asked.of([replace(SPEC, url="http://10.0.0.2:8000")]) == {}
    assert asked.of([]) == {}
    await asked.close()


@pytest.mark.parametrize(
    "said",
    [
        None, [], {}, {"0": None}, {"0": SAID | {"publisher": "null"}}, {"0": SAID | {"enable_kv_cache_events": False}},
        {"0": SAID | {"endpoint": "ipc:///tmp/x"}}, {"0": SAID | {"endpoint": "tcp://*:0"}},
        {"0": SAID | {"endpoint": None}}, {"0": SAID, "1": SAID},
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_no_source(said: Any) -> None:
    assert source_said(SPEC, said) is None


def test_a_rank_has_a_publisher_of_its_own_and_only_ports_are_taken() -> None:
    ranked = replace(SPEC, url="http://[::1]:8000", data_parallel_rank=1)
    said = {"0": SAID, "1": SAID | {"endpoint": "tcp://elsewhere:27101", "replay_endpoint": None, "topic": None}}

    assert source_said(ranked, said) == EventSource("a", "tcp://[::1]:27101", None, "", 1)
    assert source_said(replace(ranked, data_parallel_rank=2), said) is None
