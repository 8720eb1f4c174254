"""One line of a batch, run as a request of this replica that no client waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from dualmap.api_bodies.batch_lines import BatchLine, answer_line, failed_line
from dualmap.router.batches.line_client import LineClient
from dualmap.router.batches.plan import PlannedLine
from dualmap.router.batches.range_files import line_id_of, read_planned
from dualmap.router.batches.room import LineRoom
from dualmap.router.batches.storage import BatchStorage
from dualmap.router.errors import InvalidApiKeyError, ReplicaFullError, RouterError
from dualmap.router.http.forward import serve_inference
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS
from dualmap.runtime.clock import Clock
from dualmap.scheduling.backoff import backoff_s
from dualmap.scheduling.batches.batch import Batch
from dualmap.scheduling.batches.window import FIRST_LINE_S
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.scheduling.values import value

BATCH_CLASS: Final = b"batch"
"""The priority class that lines ask for. Where the pool has none of this name, they have the usual one."""
SLO_MS: Final = b"3600000"
"""The time to first token that a line asks for: none is late."""
TRIES: Final = 4
"""Times that a line is run at most which fails by the fleet's doing."""
STREAMED: Final[Mapping[str, Any]] = {"stream": True, "stream_options": {"include_usage": True}}
_ANSWERS: Final = ("n", "best_of")
_LEARNED_PART: Final = 0.05
_FIRST_WAIT_S: Final = 0.5
_RECOVERS_S: Final = 2.0
"""The wait before a second try, doubled before each further one: a fleet recovers within them from what it lost."""
_LONGEST_WAIT_S: Final = 30.0
_FAILED_BY_FLEET: Final = frozenset({0, 500, 502, 503, 504})
_FOR_NOW: Final = frozenset({429, 503})
"""Statuses of refusals that say when the request would be taken."""


@value
class LineResult:
    """What came of a line: its text in the file of answers, or in that of errors."""

    is_answer: bool
    text: bytes


class LineRunner:
    """Runs lines as there is room."""

    def __init__(self, plane: DataPlane, storage: BatchStorage, room: LineRoom, clock: Clock) -> None:
        self._plane = plane
        self._storage = storage
        self._room = room
        self._clock = clock
        self.line_s = FIRST_LINE_S
        """The time that a line is expected to take."""
        self.refused = Counter[str]()
        """Lines that the fleet refuses for now, by batch."""
        self.failing = Counter[str]()
        """Lines that failed in the fleet and wait for another try, by batch."""

    async def _wait(self, time_s: float, batch: Batch, counted: Counter[str]) -> None:
        counted[batch.batch_id] += 1
        try:
            await self._clock.sleep(time_s)
        finally:
            counted[batch.batch_id] -= 1

    async def run(
        self, batch: Batch, planned: PlannedLine, preferred: str, ends: Callable[[], bool]
    ) -> LineResult | None:
        """The result of a line; None where its batch ``ends`` before it could be run. Answers that break off, or fail
        in the fleet, are tried again; what the fleet refuses for now, and what reached no instance, waits. A line is
        read when it has room, so that those that wait take no memory. ``preferred``: the instance that runs its part of
        the batch."""
        line_id, tries, refusals, metrics = line_id_of(batch, planned), 0, 0, self._plane.metrics
        while True:
            async with self._room.place(self.pool_of(batch, planned.model), preferred, batch.batch_id) as instance_id:
                if ends():
                    return None
                line = await asyncio.to_thread(read_planned, self._storage, batch, planned)
                metrics.batch_lines_running.labels().inc()
                try:
                    client = await self._send(batch, line_id, line, instance_id)
                finally:
                    metrics.batch_lines_running.labels().inc(-1)
            is_refused = client.status in _FOR_NOW or client.is_unreached
            if is_refused and client.retry_after_s is not None:  # it has done nothing, whatever is in the line
                refusals += 1
                waits_s = backoff_s(refusals, first_s=_FIRST_WAIT_S, longest_s=_LONGEST_WAIT_S)
                counted = self.failing if client.is_unreached else self.refused
                await self._wait(max(waits_s, min(client.retry_after_s, _LONGEST_WAIT_S)), batch, counted)
                continue
            tries += 1
            failed = client.status in _FAILED_BY_FLEET or not client.is_whole
            if not failed or tries >= TRIES:
                result = _result_of(line_id, line, client)
                metrics.batch_lines.labels("answered" if result.is_answer else "failed").inc()
                return result
            metrics.batch_lines.labels("tried again").inc()
            await self._wait(backoff_s(tries, first_s=_RECOVERS_S, longest_s=_LONGEST_WAIT_S), batch, self.failing)

    def _caller_of(self, batch: Batch) -> Caller | None:
        """The sender of the lines; None where its tenant is removed, or the key of that name. One that was rotated is
        the same key. Tokens and gateways name the tenant alone."""
        tenants = self._plane.tenants
        if batch.key_digest:
            return tenants.by_name(batch.tenant, batch.key)
        tenant = tenants.tenants.get(batch.tenant)
        return None if tenant is None else Caller(tenant, batch.key, b"", batch.priority_class)

    def pool_of(self, batch: Batch, model: int) -> str:
        """The pool of a model of the batch; where none has it, any: requests for it are refused."""
        name = batch.models[model] if model < len(batch.models) else ""
        try:
            return self._plane.intake.pools.resolve(name).pool.settings.name
        except RouterError:
            return next(iter(self._plane.intake.pools.pools))

    async def _send(self, batch: Batch, line_id: str, line: BatchLine, instance_id: str) -> LineClient:
        client = LineClient(batch.endpoint)
        fields = [
            (b"content-type", b"application/json"),
            (b"x-request-id", line_id.encode()),
            (b"x-slo-ttft-ms", SLO_MS),
        ]
        if instance_id:
            fields.append((b"x-dualmap-priority", BATCH_CLASS))
        body = {**line.body, **STREAMED} if instance_id and self._streams(batch, line) else line.body
        request = ClientRequest("POST", batch.endpoint, b"", fields, False, True, body=orjson.dumps(body))
        request.only = frozenset({instance_id}) if instance_id else None
        if batch.tenant:
            request.caller = self._caller_of(batch)
            if request.caller is None:
                client.refuse(
                    InvalidApiKeyError(f"tenant {batch.tenant}, or its key {batch.key}, is not there any more")
                )
                return client
        bodies, request.counted_for = self._plane.bodies, request.pays
        try:
            bodies.take(len(request.body), request.counted_for)
        except ReplicaFullError as full:
            client.refuse(full)
            return client
        request.bodies = bodies
        try:
            await serve_inference(request, client, self._plane)
        finally:
            request.drop_body()
        tokens = client.used_tokens()
        if tokens is not None:
            self._room.learn(*tokens)
            self.line_s += _LEARNED_PART * (asyncio.get_running_loop().time() - client.received_s - self.line_s)
        return client

    def _streams(self, batch: Batch, line: BatchLine) -> bool:
        """Whether the line is answered by a stream: where answers of its class leave instances for others, so that it
        continues elsewhere. An answer of several choices would not."""
        if batch.endpoint not in COMPLETIONS_PATHS or any(line.body.get(name, 1) != 1 for name in _ANSWERS):
            return False
        pools = self._plane.intake.pools.pools.values()
        name = BATCH_CLASS.decode()
        return any(each.evictable for pool in pools for each in pool.scheduling.classes if each.name == name)


def _result_of(line_id: str, line: BatchLine, client: LineClient) -> LineResult:
    if not client.is_whole or not client.status:
        return LineResult(False, failed_line(line_id, line.custom_id, "no_answer", "its answer broke off at every try"))
    text = answer_line(line_id, line.custom_id, client.status, client.request_id, client.body)
    return LineResult(client.status == 200, text)
