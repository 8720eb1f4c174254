"""Staged KV: KV that a prefill leg has left on its instance for a decode leg, and its takeover in any case.

    prefill ── 4xx ──▶ the client        ── failure ──▶ another try: prefill elsewhere, or the whole
       │ staged
    decode ── first token ──▶ the client's answer, to its end
       └── failure ──▶ decode once more from the same KV, else another try, which prefills again

However the request ends, staged KV is taken over by a decoder (``router.http.transfers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import orjson

from dualmap.router.answers.head import ErrorAnswer
from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.router.http.answer_driver import AnswerDriver, nothing
from dualmap.router.http.connectors import PREFILL_PARAMS
from dualmap.router.http.leg_bodies import freeing_body, params_field, prefill_body, transfer_params
from dualmap.router.http.model_field import BodyPart
from dualmap.router.http.parts import Part
from dualmap.router.http.plane import DataPlane
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.sending import Abandoned, Sender, Sending
from dualmap.router.http.transfers import Try
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.request.machine import DecodeLeg
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.legs import Leg

FREEING_TRIES = 2
_PREFILL_PARAMS = orjson.dumps(PREFILL_PARAMS)


class Forwarding(Protocol):
    """Members of the forwarding that the legs of a split request need."""

    request: ClientRequest
    part: Part
    plane: DataPlane
    sender: Sender

    @property
    def other_fields(self) -> bytes: ...

    def body(self, *more: bytes, requests_usage: bool = False) -> list[BodyPart]: ...

    def to_client(
        self,
        target: InstanceSpec,
        more: Sequence[bytes],
        on_first_token: Callable[[], None],
        use: Use,
        on_sent: Callable[[], None] = nothing,
        abandoned: Abandoned = AnswerDriver.abort,
        kv_within_s: float | None = None,
    ) -> Sending: ...

    def pass_on(self, answer: ErrorAnswer) -> None: ...


class SplitLegs:
    """The legs of one split request, and the KV that is staged between them."""

    def __init__(self, live: LiveRequest, forwarding: Forwarding) -> None:
        self._live = live
        self._forwarding = forwarding
        live.on_leave = self._leave
        self._staged_body: list[BodyPart] | None = None
        """Body that a decode leg is sent to take the staged KV over; None once a decoder has it, or where there is
        none."""
        self._decode: DecodeLeg | None = None
        """The leg that was sent last: the request forgets it when it is placed again."""
        self._takes_over: list[bytes] = []
        """Fields that make that body from the client's."""

    @property
    def keeps_kv(self) -> bool:
        """Whether KV is staged that another decoder could take."""
        return self._staged_body is not None

    async def prefill(self) -> AnswerResult:
        """Send the prefill leg. Without a failure, its answer is in the result."""
        result = await self._forwarding.sender.send(
            Sending(
                self._live.target,
                self._prefill_body,
                AnswerSpec(self._forwarding.request.path, Use.PREFILL),
                on_sent=self._live.sent,
                abandoned=self._prefill_abandoned,
            )
        )
        if result.failure is not None or result.status >= 400:
            return result
        try:
            params = transfer_params(result.body)
        except ValueError as error:
            detail = f"the prefill leg's answer is no completion: {error}"
            return AnswerResult(failure=InstanceFailure(FailureKind.PROTOCOL, detail))
        if params is None:
            self._live.pool.metrics.unstaged.inc()
        else:
            self._takes_over = [params_field(params)]
            self._staged_body = self._forwarding.body(*self._takes_over)
        return result

    async def decode(self) -> AnswerResult:
        """Send the decode leg, whose answer goes to the client."""
        forwarding, self._decode = self._forwarding, self._live.machine.decode
        sending = forwarding.to_client(
            self._live.decode_target,
            self._takes_over if self._staged_body is not None else (),
            self._first_token,
            Use.DECODED,
            on_sent=self._live.sent,
            abandoned=self._abandoned,
            kv_within_s=self._live.kv_within_s,
        )
        result = await forwarding.sender.send(sending)
        if result.failure is None and result.status < 400:
            self._staged_body = None
        return result

    def _leave(self, failure: InstanceFailure | None) -> None:
        """No other decode leg is sent for the KV: have what is staged taken over. ``failure`` ended the last one."""
        staged, self._staged_body = self._staged_body, None
        if staged is None or (failure is not None and (failure.lost_kv or failure.kind is FailureKind.TRANSFER)):
            return  # gone, or stuck: that is left to the connector
        self._live.pool.metrics.freed.inc()
        self._forwarding.plane.transfers.free(self._freeing(staged))

    def _prefill_body(self) -> list[BodyPart]:
        request = self._forwarding.request
        return prefill_body(request.path, request.body, _PREFILL_PARAMS, self._forwarding.other_fields)

    def _first_token(self) -> None:
        """The decoder has the KV."""
        self._staged_body = None
        self._live.first_token()

    # the client has left -------------------------------------------------------------------------------------
    def _prefill_abandoned(self, leg: AnswerDriver) -> None:
        """The prefill leg was sent, and may have been answered."""
        request_body = self._forwarding.body()

        def staged(body: bytes) -> Callable[[], list[Try]] | None:
            try:
                params = transfer_params(body)
            except ValueError:
                return None  # it stopped
            if params is None:
                return None
            self._live.pool.metrics.freed.inc()
            return self._freeing(request_body, params)

        self._forwarding.plane.transfers.free_late(leg, staged)

    def _abandoned(self, leg: AnswerDriver) -> None:
        """The decode leg was sent. It takes the KV over before it is closed."""
        if self._staged_body is None:
            leg.abort()
        else:
            self._live.pool.metrics.freed.inc()
            self._forwarding.plane.transfers.wait_out(leg, self._freeing(self._staged_body))
        self._staged_body = None

    def _freeing(
        self, request_body: list[BodyPart], params: Mapping[str, Any] | None = None
    ) -> Callable[[], list[Try]]:
        """Decode legs without a client that take the KV over, to try one after the other."""
        pool, decode, path = self._live.pool, self._decode, self._forwarding.request.path
        sender, body = self._forwarding.sender, freeing_body(path, request_body, params)
        last_id, failed = ("", frozenset[str]()) if decode is None else (decode.last_id, decode.failed)

        def tries() -> list[Try]:
            view = pool.view.view
            ready = [view.instances[name] for name in view.of(Leg.DECODE).ready]
            ready.sort(key=lambda spec: (spec.instance_id in failed, spec.instance_id != last_id))
            return [
                (spec.url, partial(sender.parts, spec.url, spec.data_parallel_rank, [body], path))
                for spec in ready[:FREEING_TRIES]
            ]

        return tries
