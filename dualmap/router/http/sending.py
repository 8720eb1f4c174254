"""One try of a request on one instance: a connection, the bytes that go there, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from dualmap.router.answers.sse import NO_ENDING
from dualmap.router.errors import OutOfFilesError
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.exchange import Exchange
from dualmap.router.http.exchange_result import ExchangeResult, ExchangeTimes
from dualmap.router.http.heads import Header, fields_for_instance
from dualmap.router.http.leg_answer import LateAnswer
from dualmap.router.http.model_field import BodyPart
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.router.http.upstream_pool import ConnectError, parse_origin
from dualmap.router.pool.instance_loss import InstanceLossNotifier
from dualmap.router.prompts.inference_request import InferenceRequest
from dualmap.scheduling.request.charge import NOTHING_COUNTED
from dualmap.scheduling.request.outcome import FailureKind
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.values import value

_CLOSED: Final = FailureKind.CLOSED

IDLE_DEATH_S: Final = 1.0
"""A kept connection that breaks later than this was alive, and its instance at work on the request."""

ACCEPTS_S: Final = 0.5
"""Time for a port to take a connection, once it has broken one."""


def nothing() -> None: ...


Abandoned = Callable[[UpstreamConnection, Exchange], None]
"""Closes the connection of a try that was cancelled."""


def abort_abandoned(connection: UpstreamConnection, _: Exchange) -> None:
    connection.abort()


@value
class Sending:
    """A request to an instance, and who gets the answer; see ``Exchange``."""

    target: InstanceSpec
    body: Callable[[], list[BodyPart]]
    """Makes the body for every try; it is not kept while the answer is awaited."""
    downstream: Downstream
    on_commit: Callable[[], list[Header]]
    on_begin: Callable[[], None] = nothing
    on_first_token: Callable[[], None] = nothing
    leaves_usage_open: bool = False
    """It is a stream whose client does not say whether it wants the usage."""
    requests_usage: bool = False
    hides_usage: bool = False
    awaits_output: bool = False
    stops_at_mark: bool = False
    kv_within_s: float | None = None
    """Time within which the KV of a decode leg must come, see ``ExchangeTimes``."""
    exchange: Callable[..., Exchange] = Exchange
    on_sent: Callable[[], None] = nothing
    abandoned: Abandoned = abort_abandoned
    path: str | None = None
    """Path to send it to; None: that of the client's request."""


class Sender:
    """Sends one client's request, to any number of instances."""

    counted = NOTHING_COUNTED
    """What has come of the client's answer, or of its rest, from all exchanges for it, where its tokens are charged."""
    left = NO_ENDING
    """The findings in an answer that was left before its end."""

    def __init__(
        self,
        request: ClientRequest,
        inference_request: InferenceRequest,
        request_id: str,
        plane: DataPlane,
        loss_notifier: InstanceLossNotifier,
        deadline_s: float,
    ) -> None:
        self._request = request
        self._request_id = request_id
        self._plane = plane
        self._loss_notifier = loss_notifier
        self._deadline_s = deadline_s
        self._counts = inference_request.caller is not None  # no other client's tokens are charged
        # A field the router checks itself, or replaces, must not reach an instance.
        self._fields = fields_for_instance(
            request.fields,
            keep_credentials=plane.upstream_authorization is None and not plane.tenants.is_closed,
            keep_transfers=plane.settings.trust_transfers,
            http_10=request.http_10,
            trace=inference_request.trace,
            has_connection=request.get(b"connection") is not None,
        )
        if plane.upstream_authorization is not None:
            self._fields += b"authorization: %b\r\n" % plane.upstream_authorization

    async def send(self, sending: Sending) -> ExchangeResult:
        """The result of one instance. A kept connection that had died is replaced once by a new connection to the same
        instance, without counting as a try."""
        upstreams, url = self._plane.upstreams, sending.target.url
        try:
            connection = upstreams.take_idle(url) or await upstreams.connect(url)
        except ConnectError as error:
            self._plane.usage_requests.restarted(url)
            return ExchangeResult(failure=error.failure)
        sent_s = connection.loop.time()
        result = await self._exchange(sending, connection)
        if not _broke(result):
            return result
        died_idle = connection.reused and connection.silent and connection.loop.time() - sent_s < IDLE_DEATH_S
        if died_idle:
            try:
                connection = await upstreams.connect(url)
            except ConnectError:
                return result  # the instance itself has died, perhaps while it held the request
            result = await self._exchange(sending, connection)
        if not _broke(result) or (sending.downstream.committed and result.kept is None):
            return result
        return _still_accepting(result) if await self._accepts(url) else result

    async def _accepts(self, url: str) -> bool:
        """Whether the port takes a connection, soon."""
        try:
            async with asyncio.timeout(ACCEPTS_S):
                connection = await self._plane.upstreams.connect(url)
        except (ConnectError, OutOfFilesError, TimeoutError):
            return False
        connection.abort()
        return True

    async def _exchange(self, sending: Sending, connection: UpstreamConnection) -> ExchangeResult:
        plane, loss_notifier, instance_id = self._plane, self._loss_notifier, sending.target.instance_id
        exchange = self._start(sending, connection)
        try:
            plane.deadlines.add(exchange)
            loss_notifier.watch(instance_id, exchange)
            sending.on_sent()
            result = await exchange.done
        except BaseException:
            self.left = exchange.left()
            if self._counts:
                self._count(exchange)
            sending.abandoned(connection, exchange)
            raise
        finally:
            plane.deadlines.discard(exchange)
            loss_notifier.unwatch(instance_id, exchange)
            sending.downstream.set_source(None)
        plane.upstreams.release(connection)
        if self._counts:
            self._count(exchange)
        self._learn_of_usage(sending, result)
        return result

    def _count(self, exchange: Exchange) -> None:
        """Count what has come of an answer, beside what came of it before."""
        counted = exchange.counted()
        self.counted = counted if self.counted is NOTHING_COUNTED else self.counted + counted

    def _learn_of_usage(self, sending: Sending, result: ExchangeResult) -> None:
        """Learn from a stream whether its instance sends usage unrequested."""
        usage, url = self._plane.usage_requests, sending.target.url
        if result.failure is not None:
            if result.failure.kind is _CLOSED:
                usage.restarted(url)
        elif result.sends_usage_unrequested:
            usage.saw(url, sends_unrequested=True)
        elif sending.leaves_usage_open and not sending.requests_usage and result.shows_whole_stream:
            usage.saw(url, sends_unrequested=result.ending.prompt_tokens is not None)

    def _start(self, sending: Sending, connection: UpstreamConnection) -> Exchange:
        """Send the request; the exchange that awaits its answer is made afterwards, so that it delays nothing."""
        target, plane, settings = sending.target, self._plane, self._plane.settings
        try:
            connection.start(self.parts(target.url, target.data_parallel_rank, sending.body(), sending.path))
        except BaseException:
            connection.abort()
            raise
        limits_s = settings.first_byte_timeout_s, settings.chunk_timeout_s, self._deadline_s, sending.kv_within_s
        exchange = sending.exchange(
            connection,
            sending.downstream,
            ExchangeTimes(*limits_s),
            on_commit=sending.on_commit,
            on_begin=sending.on_begin,
            on_first_token=sending.on_first_token,
            port_refuses=plane.port_checks.refuses,
            hides_usage=sending.hides_usage,
            awaits_output=sending.awaits_output,
            stops_at_mark=sending.stops_at_mark,
            relay=plane.relay,
        )
        connection.answer_to(exchange)
        return exchange

    async def ask(self, target: InstanceSpec, path: str, body: bytes, within_s: float) -> bytes | None:
        """Send an instance another request than the client's. Returns the body of its answer; None where it has not
        answered with success in time."""
        upstreams, url = self._plane.upstreams, target.url
        connection: UpstreamConnection | None = None
        try:
            async with asyncio.timeout(within_s):
                connection = upstreams.take_idle(url) or await upstreams.connect(url)
                answer = LateAnswer(whole=True)
                connection.start(self.parts(url, target.data_parallel_rank, [body], path))
                connection.answer_to(answer)
                if await answer.done is not None:
                    return None
                upstreams.release(connection)
                connection = None
                return answer.body if answer.status == 200 else None
        except (ConnectError, OutOfFilesError, TimeoutError):
            return None
        finally:
            if connection is not None:
                connection.abort()

    def parts(self, url: str, rank: int | None, body: list[BodyPart], path: str | None = None) -> list[BodyPart]:
        """The request as bytes, its head first, for an instance or for one rank of it. ``path``: another one."""
        return [self._head(url, rank, sum(map(len, body)), path or self._request.path), *body]

    def _head(self, url: str, rank: int | None, body_bytes: int, path: str) -> bytes:
        request, fields = self._request, self._fields
        origin = parse_origin(url)
        query = b"?" + request.query if request.query else b""
        if rank is not None:
            fields = b"x-data-parallel-rank: %d\r\n%b" % (rank, fields)
        return b"%b %b%b%b HTTP/1.1\r\nhost: %b\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            request.method.encode(),
            origin.base_path,
            path.encode("latin-1"),
            query,
            origin.authority,
            fields,
            self._request_id.encode(),
            body_bytes,
        )


def _broke(result: ExchangeResult) -> bool:
    """Whether the connection broke before the end of the answer."""
    return result.failure is not None and result.failure.kind is _CLOSED


def _still_accepting(result: ExchangeResult) -> ExchangeResult:
    """The result where the port took a connection after it had broken one: something in front of the engine accepts, or
    the engine lives."""
    assert result.failure is not None
    return replace(result, failure=replace(result.failure, still_accepts=True))
