"""Staged KV: KV that a prefill leg has left on its instance for a decode leg, and its takeover in any case.

    prefill ── 4xx ──▶ the client        ── failure ──▶ another try: prefill elsewhere, or the whole
       │ staged
    decode ── first token ──▶ the client's answer, to its end
       └── failure ──▶ decode once more from the same KV, else another try, which prefills again

However the request ends, staged KV is taken over by a decoder (``router.http.transfers``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.router.http.answer_driver import AnswerDriver
from dualmap.router.http.body_edits import BodyPart
from dualmap.router.http.connectors import PREFILL_PARAMS
from dualmap.router.http.leg_bodies import freeing_body, params_field, prefill_body, transfer_params
from dualmap.router.http.sending import Sending
from dualmap.router.http.transfers import Try
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.request.machine import DecodeLeg
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure
from dualmap.scheduling.state.legs import Leg

if TYPE_CHECKING:
    from dualmap.router.http.forward import Forwarding

FREEING_TRIES = 2
_PREFILL_PARAMS = orjson.dumps(PREFILL_PARAMS)


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
                self._live.machine.instance_for(Leg.PREFILL),
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
            self._live.machine.instance_for(Leg.DECODE),
            self._takes_over if self._staged_body is not None else (),
            self._first_token,
            Use.DECODED,
            on_sent=self._live.sent,
            abandoned=self._abandoned,
            kv_within_s=self._live.machine.kv_within_s,
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
