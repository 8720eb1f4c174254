"""One try of a split request: its prefill leg, then its decode leg, which the client sees.

    prefill ── 4xx ──▶ the client        ── failure ──▶ another try: prefill elsewhere, or the whole
       │ staged
    decode ── first token ──▶ the client's answer, to its end
       └── failure ──▶ decode once more from the same KV, else another try, which prefills again

Whatever way it ends, staged KV is taken over by a decoder (``router.http.transfers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from dualmap.router.connectors import PREFILL_PARAMS
from dualmap.router.decode_leg import DecodeLeg
from dualmap.router.errors import RouterError
from dualmap.router.http.attempt import ErrorAnswer, ExchangeResult
from dualmap.router.http.downstream import Downstream
from dualmap.router.http.exchange import Exchange
from dualmap.router.http.heads import Header
from dualmap.router.http.leg_answer import NO_CLIENT, PrefillExchange
from dualmap.router.http.leg_bodies import freeing_body, params_edit, prefill_body, transfer_params
from dualmap.router.http.model_field import BodyPart, Edit
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import Request
from dualmap.router.http.sending import Sender, Sending, Target
from dualmap.router.http.transfers import Try
from dualmap.router.http.upstream import UpstreamConnection
from dualmap.router.lifecycle import SplitRequest
from dualmap.router.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.state.legs import Leg

FREEING_TRIES = 2
_PREFILL_PARAMS = orjson.dumps(PREFILL_PARAMS)
_NEEDS_PREFILL = (FailureKind.NO_DECODER, FailureKind.RECOMPUTED, FailureKind.TRANSFER)
"""No other decoder is tried with the same KV. A transfer that is stuck may be so for its source, which a decoder whose
leg is aborted may have told to free the KV."""


class Forwarding(Protocol):
    """What a try needs of the request's forwarding."""

    request: Request
    downstream: Downstream
    plane: DataPlane
    sender: Sender

    @property
    def other_model(self) -> str | None: ...

    @property
    def streams(self) -> bool: ...

    @property
    def answer_exchange(self) -> type[Exchange]: ...

    def body(self, *more: Edit, asks_usage: bool = False) -> list[BodyPart]: ...

    def to_client(
        self,
        target: Target,
        edits: Sequence[Edit] = (),
        on_first_token: Callable[[], None] | None = None,
        **how: Any,
    ) -> Sending: ...

    def pass_on(self, answer: ErrorAnswer) -> None: ...


class SplitTry:
    """Lives for one try."""

    def __init__(self, placed: SplitRequest, forwarding: Forwarding) -> None:
        self._placed = placed
        self._forwarding = forwarding
        self._staged_body: list[BodyPart] | None = None
        """What a decode leg is sent to take the staged KV over; None once a decoder has it, or where there is none."""
        self._takes_over: list[Edit] = []
        """That body's difference from the client's."""
        self._decodes = 0

    async def run(self) -> ExchangeResult:
        """With a failure if the request may be tried again."""
        forwarding = self._forwarding
        result = await forwarding.sender.send(
            Sending(
                self._placed,
                self._prefill_body,
                NO_CLIENT,
                list[Header],
                on_sent=self._placed.sent,
                abandoned=self._prefill_abandoned,
                exchange=PrefillExchange,
            )
        )
        if result.failure is not None:
            return result
        if result.status >= 400:
            forwarding.pass_on(result.as_error())
            return result
        try:
            params = transfer_params(result.body)
        except ValueError as error:
            detail = f"the prefill leg's answer is no completion: {error}"
            return ExchangeResult(failure=InstanceFailure(FailureKind.PROTOCOL, detail))
        if params is None:
            self._placed.pool.metrics.unstaged.inc()
        else:
            self._takes_over = [params_edit(forwarding.request.body, params)]
            self._staged_body = forwarding.body(*self._takes_over)
        decode = self._placed.prefill_done()
        try:
            return await self._decode(decode)
        finally:
            if self._staged_body is not None:
                self._placed.pool.metrics.freed.inc()
                forwarding.plane.transfers.free(self._freeing(self._staged_body))

    # the legs ------------------------------------------------------------------------------------------------
    def _prefill_body(self) -> list[BodyPart]:
        request = self._forwarding.request
        return prefill_body(request.path, request.body, _PREFILL_PARAMS, self._forwarding.other_model)

    async def _decode(self, decode: DecodeLeg) -> ExchangeResult:
        loop = decode.loop_time
        staged_until_s = loop() + self._placed.pool.settings.staged_timeout_s
        while True:
            failure = await decode.place()
            result = await self._answer(decode) if failure is None else ExchangeResult(failure=failure)
            failure = result.failure
            if failure is None or self._forwarding.downstream.committed or result.overdue:
                return result
            if failure.kind is FailureKind.TIMEOUT and not self._forwarding.streams:
                return result
            gone = failure.kind in _NEEDS_PREFILL or loop() > staged_until_s
            if self._staged_body is None or gone or self._decodes > 1:
                if failure.lost_kv or failure.kind is FailureKind.TRANSFER:  # a stuck one: left to the connector
                    self._staged_body = None
                return result
            try:
                await decode.retry(failure)
            except RouterError:
                return result
            self._placed.pool.metrics.decode_retries.inc()

    async def _answer(self, decode: DecodeLeg) -> ExchangeResult:
        """One try of the decode leg."""
        self._decodes += 1
        forwarding = self._forwarding
        sending = forwarding.to_client(
            decode,
            self._takes_over if self._staged_body is not None else (),
            self._first_token,
            awaits_output=True,
            kv_within_s=decode.kv_within_s,
            exchange=forwarding.answer_exchange,
            abandoned=self._abandoned,
        )
        result = await forwarding.sender.send(sending)
        if result.failure is None and result.status < 400:
            self._staged_body = None
        return result

    def _first_token(self) -> None:
        """The decoder has the KV."""
        self._staged_body = None
        self._placed.first_token()

    # the client has left -------------------------------------------------------------------------------------
    def _prefill_abandoned(self, connection: UpstreamConnection, exchange: Exchange) -> None:
        """The prefill leg was sent, and may have been answered."""
        begun, request_body = exchange.held_body(), self._forwarding.body()

        def staged(body: bytes) -> Callable[[], list[Try]] | None:
            try:
                params = transfer_params(body)
            except ValueError:
                return None  # it stopped
            if params is None:
                return None
            self._placed.pool.metrics.freed.inc()
            return self._freeing(request_body, params)

        self._forwarding.plane.transfers.free_late(connection, begun, staged)

    def _abandoned(self, connection: UpstreamConnection, _: Exchange) -> None:
        """The decode leg was sent. It takes the KV over before it is closed."""
        if self._staged_body is None:
            connection.abort()
        else:
            self._placed.pool.metrics.freed.inc()
            self._forwarding.plane.transfers.wait_out(connection, self._freeing(self._staged_body))
        self._staged_body = None

    def _freeing(
        self, request_body: list[BodyPart], params: Mapping[str, Any] | None = None
    ) -> Callable[[], list[Try]]:
        """Decode legs without a client that take the KV over, to try one after the other."""
        pool, decode, path = self._placed.pool, self._placed.begin_decode(), self._forwarding.request.path
        sender = self._forwarding.sender
        body, last_id, failed = freeing_body(path, request_body, params), decode.last_instance_id, decode.failed

        def tries() -> list[Try]:
            view = pool.view.view
            ready = [view.instances[name] for name in view.of(Leg.DECODE).ready]
            ready.sort(key=lambda spec: (spec.instance_id in failed, spec.instance_id != last_id))
            return [
                (spec.url, partial(sender.parts, spec.url, spec.data_parallel_rank, [body]))
                for spec in ready[:FREEING_TRIES]
            ]

        return tries
