"""The leader's sweeps are bounded: in calls at once, and in how often they follow a request that moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from statestore.base import RequestRecord, RequestState
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis import codec
from statestore.redis.leader import LeaderCalls


class Server:
    """Answers as a store of 600 instances, on which a request is never where it was last seen."""

    def __init__(self) -> None:
        self.scripts: list[str] = []
        self.at_once = 0
        self.most_at_once = 0

    async def command(self, name: str, *arguments: Any) -> Any:
        if name == "SMEMBERS":
            return [b"i%d" % number for number in range(600)]
        return [b"0", [b"r", codec.record_json(RECORD)]]

    async def script(self, name: str, keys: Sequence[bytes], *arguments: Any) -> Any:
        self.scripts.append(name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        return b"elsewhere" if name == "reap_request" else 1


RECORD = RequestRecord(
    request_id="r",
    replica_id="gone",
    instance_id="i1",
    state=RequestState.HELD,
    attempt=1,
    uncached_tokens=100,
    prompt_tokens=100,
    expected_output_tokens=10,
    slo_ms=5000,
    enqueued_ms=1,
    dispatched_ms=0,
    prefilled_ms=0,
    alternative_id=None,
    alternative_uncached_tokens=0,
    sequence=1,
)


def leader(server: Server) -> LeaderCalls:
    unused: Any = None
    calls: Any = server
    return LeaderCalls(PoolKeys("dualmap", "default"), calls, b"", unused)


async def test_a_sweep_over_a_large_fleet_leaves_room_for_other_calls() -> None:
    server = Server()

    granted = await leader(server).grant_overdue(fence=1)

    assert (granted, len(server.scripts)) == (600, 600)
    assert server.most_at_once == 256


async def test_a_dead_replica_is_not_forgotten_before_a_request_that_keeps_moving() -> None:
    server = Server()

    with pytest.raises(StoreUnavailableError, match="request r keeps moving"):
        await leader(server).reap("gone", fence=1)

    assert set(server.scripts) == {"reap_request"}
