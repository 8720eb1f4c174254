"""One try of a request on one instance: a connection, the bytes that go there, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, replace
from typing import Final

from dualmap.router.answers.failures import AnswerTimes
from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.router.answers.sse import NO_ENDING
from dualmap.router.errors import OutOfFilesError
from dualmap.router.http.answer_driver import AnswerDriver, Receiver, nothing
from dualmap.router.http.body_edits import BodyPart
from dualmap.router.http.heads import fields_for_instance
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

Abandoned = Callable[[AnswerDriver], None]
"""Closes the connection of a try that was cancelled."""


@value
class Sending:
    """A request to an instance, and who gets the answer."""

    target: InstanceSpec
    body: Callable[[], list[BodyPart]]
    """Makes the body for every try; it is not kept while the answer is awaited."""
    answer: AnswerSpec
    receiver: Receiver | None = None
    """None: no client gets it."""
    on_sent: Callable[[], None] = nothing
    _: KW_ONLY
    abandoned: Abandoned = AnswerDriver.abort
    kv_within_s: float | None = None
    """Time within which the KV of a decode leg must come, see ``AnswerTimes``."""
    leaves_usage_open: bool = False
    """The answer streams, and the client does not say whether it wants the usage."""
    requests_usage: bool = False


class Sender:
    """Sends one client's request, to any number of instances."""

    counted = NOTHING_COUNTED
    """What has come of the client's answer, or of its rest, from all exchanges for it, where its tokens are charged."""
    left = NO_ENDING
    """The findings in an answer that was left before its end."""
    driver: AnswerDriver | None = None
    """That of the client's answer, or of a part of it, while it is awaited. Not longer: it has what refers to this."""

    def __init__(
        self,
        request: ClientRequest,
        inference_request: InferenceRequest,
        request_id: str,
        plane: DataPlane,
        loss_notifier: InstanceLossNotifier,
        deadline_s: float,
        *,
        run: str = "",
    ) -> None:
        """``run`` is the name of the run whose turn it is, for the instance."""
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
            run=run,
        )
        if plane.upstream_authorization is not None:
            self._fields += b"authorization: %b\r\n" % plane.upstream_authorization

    async def send(self, sending: Sending) -> AnswerResult:
        """The result of one instance. A kept connection that had died is replaced once by a new connection to the same
        instance, without counting as a try."""
        upstreams, url = self._plane.upstreams, sending.target.url
        try:
            connection = upstreams.take_idle(url) or await upstreams.connect(url)
        except ConnectError as error:
            self._plane.usage_requests.restarted(url)
            return AnswerResult(failure=error.failure)
        sent_s = connection.loop.time()
        result = await self._try(sending, connection)
        if not _broke(result):
            return result
        died_idle = connection.reused and connection.silent and connection.loop.time() - sent_s < IDLE_DEATH_S
        if died_idle:
            try:
                connection = await upstreams.connect(url)
            except ConnectError:
                return result  # the instance itself has died, perhaps while it held the request
            result = await self._try(sending, connection)
        begun = sending.receiver is not None and sending.receiver.part.has_begun
        if not _broke(result) or (begun and result.kept is None):
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

    async def _try(self, sending: Sending, connection: UpstreamConnection) -> AnswerResult:
        plane, loss_notifier, instance_id = self._plane, self._loss_notifier, sending.target.instance_id
        receiver, driver = sending.receiver, self._start(sending, connection)
        if receiver is not None:
            self.driver = driver
        try:
            plane.deadlines.add(driver)
            loss_notifier.watch(instance_id, driver)
            sending.on_sent()
            result = await driver.done
        except BaseException:
            self.left = driver.so_far()
            if self._counts:
                self.counted += driver.machine.counted()
            sending.abandoned(driver)
            raise
        finally:
            plane.deadlines.discard(driver)
            loss_notifier.unwatch(instance_id, driver)
            if receiver is not None:
                receiver.part.release()
                self.driver = None
        plane.upstreams.release(connection)
        if self._counts:
            counted = driver.machine.counted()
            self.counted = counted if self.counted is NOTHING_COUNTED else self.counted + counted
        if sending.leaves_usage_open or result.failure is not None or result.sends_usage_unrequested:
            self._learn_of_usage(sending, result)
        return result

    def _learn_of_usage(self, sending: Sending, result: AnswerResult) -> None:
        """Learn from a stream whether its instance sends usage unrequested."""
        usage, url = self._plane.usage_requests, sending.target.url
        if result.failure is not None:
            if result.failure.kind is _CLOSED:
                usage.restarted(url)
        elif result.sends_usage_unrequested:
            usage.saw(url, sends_unrequested=True)
        elif not sending.requests_usage and result.shows_whole_stream:
            shown = result.usage
            usage.saw(url, sends_unrequested=shown is not None and shown.prompt_tokens is not None)

    def _start(self, sending: Sending, connection: UpstreamConnection) -> AnswerDriver:
        """Send the request; the driver that awaits its answer is made afterwards, so that it delays nothing."""
        target, plane, settings = sending.target, self._plane, self._plane.settings
        try:
            connection.start(self.parts(target.url, target.data_parallel_rank, sending.body(), sending.answer.path))
        except BaseException:
            connection.abort()
            raise
        times = AnswerTimes(
            settings.first_byte_timeout_s, settings.chunk_timeout_s, self._deadline_s, sending.kv_within_s
        )
        driver = AnswerDriver(
            connection,
            sending.answer,
            sending.receiver,
            times,
            port_refuses=plane.port_checks.refuses,
            relay=plane.relay,
        )
        connection.answer_to(driver)
        return driver

    async def ask(self, target: InstanceSpec, path: str, body: bytes, within_s: float) -> bytes | None:
        """Send an instance another request than the client's. Returns the body of its answer; None where it has not
        answered with success in time."""
        upstreams, url = self._plane.upstreams, target.url
        connection: UpstreamConnection | None = None
        try:
            async with asyncio.timeout(within_s):
                connection = upstreams.take_idle(url) or await upstreams.connect(url)
                connection.start(self.parts(url, target.data_parallel_rank, [body], path))
                driver = AnswerDriver(connection, AnswerSpec(path, Use.INTERNAL))
                connection.answer_to(driver)
                result = await driver.done
                if result.failure is not None:
                    return None
                upstreams.release(connection)
                connection = None
                return result.body if result.status == 200 else None
        except (ConnectError, OutOfFilesError, TimeoutError):
            return None
        finally:
            if connection is not None:
                connection.abort()

    def parts(self, url: str, rank: int | None, body: list[BodyPart], path: str) -> list[BodyPart]:
        """The request as bytes, its head first, for an instance or for one rank of it."""
        return [self._head(url, rank, sum(map(len, body)), path), *body]

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


def _broke(result: AnswerResult) -> bool:
    """Whether the connection broke before the end of the answer."""
    return result.failure is not None and result.failure.kind is _CLOSED


def _still_accepting(result: AnswerResult) -> AnswerResult:
    """The result where the port took a connection after it had broken one: something in front of the engine accepts, or
    the engine lives."""
    assert result.failure is not None
    return replace(result, failure=replace(result.failure, still_accepts=True))
