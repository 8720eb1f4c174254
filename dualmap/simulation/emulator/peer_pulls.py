"""Pulls of KV from the caches of other emulated servers, as vLLM's tier of type ``p2p`` has them.

A request that names a source (``kv_transfer_params: {"remote_kv_source": …}``) is given what that server has of its
prompt. The source says how many of the wanted blocks it serves, and when its link is through with them; the server that
pulls waits for that and for its own link, and makes sure that the source is still there. A source that cannot be
reached, refuses, or keeps its blocks in another layout is a miss: the prompt is computed, as if no source were named. A
source that dies or is silent during the pull is a failure to load, which ``kv_load_failure_policy`` decides about.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.fields import read_json, whole_number
from dualmap.simulation.emulator.kv_transfer_params import PeerSource
from dualmap.simulation.emulator.routes import Route, Routes, send
from dualmap.simulation.emulator.server_calls import post
from dualmap.simulation.engine.engine_types import EngineConfig

LOOK_TIMEOUT_S = 30.0
"""Time for a source to say what it serves, and for all of it to come, as vLLM has it."""
ALIVE_TIMEOUT_S = 5.0


class PullingEngine(Protocol):
    """The engine as its pulls use it, by the ids of the engine."""

    def wanted_blocks(self, engine_id: str) -> tuple[int, ...]: ...

    def serve(self, hashes: Sequence[int]) -> int: ...

    def receive_pulled(self, engine_id: str, blocks: int, busy_s: float) -> None:
        """So many blocks have come; the rest is computed."""

    def lose(self, engine_id: str, why: str) -> None:
        """A pull has failed."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a source has said: it serves so many blocks, and its link is through with them after some time."""

    blocks: int
    boot_id: str
    within_s: float


class PeerPulls:
    """The pulls of one server: for its own requests, and by others from its cache."""

    def __init__(self, engine: PullingEngine, config: EngineConfig, wall_s: Callable[[float], float]) -> None:
        self._engine = engine
        self._transfer = config.transfer
        self._block_tokens = config.block_tokens
        self._wall_s = wall_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._free_s = 0.0
        """When its link is free, by the machine's clock."""
        self.served = 0
        """Pulls that it was to serve blocks for."""
        self._ordered = {"stall": 0, "refuse": 0}
        """Pulls from here that are never to end, and that are to be refused, as faults on demand."""
        self.reboot()

    @property
    def layout(self) -> str:
        """What both ends of a pull must have alike."""
        return f"{self._block_tokens} tokens of {self._transfer.bytes_per_token} bytes"

    def reboot(self) -> None:
        """A new engine process: what it was to serve does not come."""
        self._boot_id = str(uuid4())
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    def routes(self) -> Routes:
        return {
            "/emulator/peer/look": {"POST": Route(self._look)},
            "/emulator/peer/alive": {"POST": Route(self._alive)},
            "/emulator/peer/stall": {"POST": Route(partial(self._order, "stall"))},
            "/emulator/peer/refuse": {"POST": Route(partial(self._order, "refuse"))},
        }

    # requests that pull -----------------------------------------------------------------------------------------
    def pull(self, engine_id: str, source: PeerSource) -> None:
        """A request has its blocks; what the source has of its prompt is to come."""
        self._tasks[engine_id] = asyncio.get_running_loop().create_task(self._pull(engine_id, source))

    def leave(self, engine_id: str) -> None:
        """A request has ended; nothing more comes for it."""
        task = self._tasks.pop(engine_id, None)
        if task is not None and not task.done():
            task.cancel()

    async def _pull(self, engine_id: str, source: PeerSource) -> None:
        wanted = {"layout": self.layout, "blocks": self._engine.wanted_blocks(engine_id)}
        offer = _offer(await post(source.url("look"), wanted, LOOK_TIMEOUT_S))
        if offer is None or not offer.blocks:
            return self._engine.receive_pulled(engine_id, 0, 0.0)
        tokens = offer.blocks * self._block_tokens
        own_s = self._occupy(tokens)
        await asyncio.sleep(min(LOOK_TIMEOUT_S, max(own_s, offer.within_s) + self._wall_s(self._transfer.latency_s)))
        alive = await post(source.url("alive"), {}, ALIVE_TIMEOUT_S)
        if alive is None or alive.get("boot_id") != offer.boot_id or offer.within_s > LOOK_TIMEOUT_S:
            self._tasks.pop(engine_id, None)  # it is this task that runs
            return self._engine.lose(engine_id, "the peer was lost during the pull")
        return self._engine.receive_pulled(engine_id, offer.blocks, self._transfer.alone_s(tokens))

    def _occupy(self, tokens: int) -> float:
        """Have the link move ``tokens`` after those before. Returns the time until then, on the machine's clock."""
        now_s = time.monotonic()
        self._free_s = max(now_s, self._free_s) + self._wall_s(tokens / self._transfer.tokens_per_s)
        return self._free_s - now_s

    # pulls from here --------------------------------------------------------------------------------------------
    def _look(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        if payload.get("layout") != self.layout or self._is_ordered("refuse"):
            return send(responder, {"blocks": 0, "boot_id": self._boot_id, "within_s": 0.0})
        blocks = self._engine.serve(tuple(payload.get("blocks", ())))
        self.served += blocks > 0
        stalls = blocks > 0 and self._is_ordered("stall")
        within_s = 2 * LOOK_TIMEOUT_S if stalls else self._occupy(blocks * self._block_tokens)
        return send(responder, {"blocks": blocks, "boot_id": self._boot_id, "within_s": within_s})

    def _alive(self, _request: HttpRequest, responder: Responder) -> None:
        send(responder, {"boot_id": self._boot_id})

    def _is_ordered(self, fault: str) -> bool:
        ordered = self._ordered[fault] > 0
        self._ordered[fault] -= ordered
        return ordered

    def _order(self, fault: str, request: HttpRequest, responder: Responder) -> None:
        self._ordered[fault] = whole_number(read_json(request.body), "count", 1)
        send(responder, {fault: self._ordered[fault]})


def _offer(reply: dict[str, Any] | None) -> Offer | None:
    """None where the source gave no offer."""
    try:
        return None if reply is None else Offer(reply["blocks"], reply["boot_id"], reply["within_s"])
    except KeyError:
        return None
