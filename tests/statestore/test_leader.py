"""How far the leader follows a request that moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scheduling.queue_order import QueueOrder
from statestore.errors import StoreUnavailableError
from statestore.keys import PoolKeys
from statestore.redis.leader import LeaderCalls
from statestore.redis.placing import PlacedRequests

RECORD = [
    part
    for item in {
        b"instance_id": b"a",
        b"replica_id": b"gone",
        b"state": b"held",
        b"attempt": b"1",
        b"uncached_tokens": b"100",
        b"prompt_tokens": b"100",
        b"expected_output_tokens": b"10",
        b"slo_ms": b"5000",
    }.items()
    for part in item
]


class Server:
    """Answers as a store on which a request is never where it was last seen."""

    def __init__(self) -> None:
        self.scripts: list[str] = []

    async def now_ms(self) -> int:
        return 1

    async def command(self, name: str, *arguments: Any) -> Any:
        return b"a"

    async def together(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self._answer(*command) for command in commands]

    def _answer(self, name: str, key: bytes, *arguments: Any) -> Any:
        match name:
            case "SMEMBERS":
                return [b"a"]
            case "HGETALL":
                return RECORD if key.endswith(b":request:r") else []
            case "ZRANGE":
                return [b"r 100"] if b":queue:" in key else []
        return [None] * len(arguments)

    async def script(self, name: str, *arguments: Any) -> Any:
        self.scripts.append(name)
        return [b"elsewhere"]


async def test_a_dead_replica_is_not_forgotten_before_a_request_that_keeps_moving() -> None:
    server: Any = Server()
    unused: Any = None
    leader = LeaderCalls(PoolKeys("dualmap", "default"), server, QueueOrder(False, 30.0), unused, PlacedRequests())

    with pytest.raises(StoreUnavailableError, match="request r keeps moving"):
        await leader.reap("gone", fence=1)

    assert set(server.scripts) == {"finish_request"}
