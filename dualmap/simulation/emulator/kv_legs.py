"""The KV of split requests between emulated servers: what is staged, and its move from one to another.

A prefill leg stages its KV, and its answer says where (``kv_transfer_params``). A decode leg with these moves it: it
queries the other server for the KV, takes as long as the bytes need, and has it released. The layerwise connector
begins at the decode leg: once that has its blocks it requests a prefill leg from its metaserver, which sends the KV to
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol
from uuid import uuid4

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.fields import read_json, whole_number
from dualmap.simulation.emulator.kv_transfer_params import KvTransferParams
from dualmap.simulation.emulator.routes import Route, Routes, send
from dualmap.simulation.emulator.server_calls import post
from dualmap.simulation.engine.kv_transfer import KvTransfer

CALL_TIMEOUT_S = 5.0


class KvEngine(Protocol):
    """The engine as its KV legs use it, by the ids of the engine."""

    def has_staged(self, engine_id: str) -> bool: ...

    def release_staged(self, engine_id: str) -> None: ...

    def receive(self, engine_id: str) -> None:
        """The KV of a decode leg has come."""

    def lose(self, engine_id: str, why: str) -> None:
        """The KV will not come."""


class KvLegs:
    """The moves of one server."""

    def __init__(self, engine: KvEngine, transfer: KvTransfer, wall_s: Callable[[float], float]) -> None:
        self._engine = engine
        self._transfer = transfer
        self._wall_s = wall_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._releasing: set[asyncio.Task[None]] = set()
        self._sources: dict[str, dict[str, Any]] = {}
        """Sources of decode legs whose KV has not come, by their id in the engine."""
        self._awaited: dict[str, str] = {}
        """Layerwise decode legs by their request id: the id in the engine."""
        self._stalling = 0
        """Moves that are never to end, as a fault on demand."""
        self.host, self.port = "", 0
        self.reboot()

    def reboot(self) -> None:
        """A new engine process: what was staged is gone."""
        self._boot_id = str(uuid4())
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()
        self._sources.clear()
        self._awaited.clear()

    def routes(self) -> Routes:
        return {
            "/emulator/kv/look": {"POST": Route(self._look)},
            "/emulator/kv/release": {"POST": Route(self._release)},
            "/emulator/kv/received": {"POST": Route(self._received)},
            "/emulator/kv/stall": {"POST": Route(self._stall)},
        }

    # prefill legs -------------------------------------------------------------------------------------------
    def staged(self, engine_id: str, tokens: int, block_tokens: int) -> dict[str, Any]:
        """``kv_transfer_params`` of the answer of a prefill leg."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(range(-(-tokens // block_tokens))),
            "remote_engine_id": self._boot_id,
            "remote_request_id": engine_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "remote_pcp_size": 1,
        }

    def send(self, source: dict[str, Any], tokens: int) -> None:
        """The KV of a layerwise prefill leg goes to its decoder: the last layer's, as the others went before."""
        task = asyncio.get_running_loop().create_task(self._send(source))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _send(self, source: dict[str, Any]) -> None:
        if self._stalls():
            return
        await asyncio.sleep(self._wall_s(self._transfer.latency_s))
        await self._call(source, "received")

    # decode legs --------------------------------------------------------------------------------------------
    def enter(self, engine_id: str, transfer: KvTransferParams) -> None:
        if transfer.source is not None:
            self._sources[engine_id] = transfer.source

    def pull(self, engine_id: str, transfer: KvTransferParams, tokens: int) -> None:
        """A decode leg has its blocks, and the KV of ``tokens`` is to come."""
        task = asyncio.get_running_loop().create_task(self._pull(engine_id, transfer, tokens))
        self._tasks[engine_id] = task

    async def _pull(self, engine_id: str, transfer: KvTransferParams, tokens: int) -> None:
        if self._stalls():
            return
        if transfer.source is None:
            await self._announce(engine_id, transfer)
        elif not await self._call(transfer.source, "look"):
            self._lose(engine_id, "the KV is not staged any more")
        else:
            await asyncio.sleep(self._wall_s(self._transfer.alone_s(tokens)))
            if await self._call(transfer.source, "release"):
                self._sources.pop(engine_id, None)
                self._engine.receive(engine_id)
            else:
                self._lose(engine_id, "the KV was lost during its transfer")

    async def _announce(self, engine_id: str, transfer: KvTransferParams) -> None:
        assert transfer.metaserver is not None
        self._awaited[transfer.request_id] = engine_id
        params = self.staged(transfer.request_id, 1, 1) | {"do_remote_prefill": False, "do_remote_decode": True}
        asked = {**params, "request_id": transfer.request_id}
        if not _is_well(await post(transfer.metaserver, asked, CALL_TIMEOUT_S)):
            self._lose(engine_id, "the metaserver found no prefill instance")

    def _lose(self, engine_id: str, why: str) -> None:
        self._sources.pop(engine_id, None)
        self._tasks.pop(engine_id, None)  # it is this task that runs
        self._engine.lose(engine_id, why)

    def take(self, transfer: KvTransferParams | None) -> None:
        """Take the KV of a decode leg over at once, and compute nothing."""
        if transfer is not None and transfer.source is not None:
            release = asyncio.get_running_loop().create_task(self._let_go(transfer.source))
            self._releasing.add(release)
            release.add_done_callback(self._releasing.discard)

    def leave(self, engine_id: str) -> None:
        """A decode leg has ended. Where its KV had not come, the prefill instance is sent a request to free it."""
        task = self._tasks.pop(engine_id, None)
        if task is not None and not task.done():
            task.cancel()
        if self._awaited:
            self._awaited = {name: other for name, other in self._awaited.items() if other != engine_id}
        source = self._sources.pop(engine_id, None)
        if source is not None:
            release = asyncio.get_running_loop().create_task(self._let_go(source))
            self._releasing.add(release)
            release.add_done_callback(self._releasing.discard)

    async def _let_go(self, source: dict[str, Any]) -> None:
        await self._call(source, "release")

    async def _call(self, source: dict[str, Any], what: str) -> bool:
        host = f"[{source['remote_host']}]" if ":" in source["remote_host"] else source["remote_host"]
        return _is_well(await post(f"http://{host}:{source['remote_port']}/emulator/kv/{what}", source, CALL_TIMEOUT_S))

    def _stalls(self) -> bool:
        """Whether this move is ordered to hang."""
        stalls = self._stalling > 0
        self._stalling -= stalls
        return stalls

    def _stall(self, request: HttpRequest, responder: Responder) -> None:
        self._stalling = whole_number(read_json(request.body), "count", 1)
        send(responder, {"stalling": self._stalling})

    # the other server's calls -------------------------------------------------------------------------------
    def _look(self, request: HttpRequest, responder: Responder) -> None:
        send(responder, {"staged": self._here(read_json(request.body)) is not None})

    def _release(self, request: HttpRequest, responder: Responder) -> None:
        engine_id = self._here(read_json(request.body))
        if engine_id is not None:
            self._engine.release_staged(engine_id)
        send(responder, {"staged": engine_id is not None})

    def _received(self, request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        engine_id = self._awaited.pop(str(payload.get("remote_request_id")), None)
        if engine_id is not None and payload.get("remote_engine_id") == self._boot_id:
            self._engine.receive(engine_id)
        send(responder, {"staged": engine_id is not None})

    def _here(self, payload: dict[str, Any]) -> str | None:
        engine_id = str(payload.get("remote_request_id"))
        known = payload.get("remote_engine_id") == self._boot_id and self._engine.has_staged(engine_id)
        return engine_id if known else None

    async def close(self) -> None:
        """Let releases end that are under way, cancel the rest."""
        self.reboot()
        if self._releasing:
            await asyncio.wait(tuple(self._releasing), timeout=CALL_TIMEOUT_S)


def _is_well(reply: dict[str, Any] | None) -> bool:
    """Whether a server answers that all is well."""
    return reply is not None and reply.get("staged", True) is True
