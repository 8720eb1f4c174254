"""The legs of a split request by a layerwise connector: the decode leg goes first, and requests its prefill leg.

    decode sent ── it has memory ──▶ prefill sent ── layer by layer ──▶ first token ──▶ the client's answer
         └── failure ───────────────────┴── failure ──▶ another try; the other leg is aborted

Nothing is staged: the prefill instance sends KV to a decoder that waits for it. A leg that is aborted frees its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import orjson

from dualmap.router.answers.failures import never_asked, stuck_transfer
from dualmap.router.answers.machine import AnswerSpec, Use
from dualmap.router.answers.result import AnswerResult
from dualmap.router.http.connectors import layerwise_decode_params
from dualmap.router.http.leg_bodies import params_field, prefill_body
from dualmap.router.http.sending import Sending
from dualmap.router.requests.live_request import LiveRequest
from dualmap.scheduling.state.legs import Leg

if TYPE_CHECKING:
    from dualmap.router.http.forward import Forwarding


class LayerwiseLegs:
    """The two legs of one try, both of which are placed."""

    failed_leg: Leg | None = None
    """PREFILL where that one failed."""

    def __init__(self, live: LiveRequest, forwarding: Forwarding) -> None:
        self._live = live
        self._forwarding = forwarding
        self._body = forwarding.request.body  # of the prefill leg, which is made when the answer may have begun

    async def run(self) -> AnswerResult:
        """The result of the decode leg, or that of a prefill leg that ended before it."""
        live = self._live
        call = live.context.metaserver.expect()
        answering = asyncio.ensure_future(self._answer(call.url))
        try:
            limit_s = live.pool.settings.transfer_timeout_s
            await asyncio.wait((call.params, answering), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return await answering
            if not call.params.done():
                return AnswerResult(failure=never_asked(limit_s))
            return await self._prefill(call.params.result(), answering)
        finally:
            live.context.metaserver.forget(call)
            await _end(answering)

    async def _prefill(self, params: dict[str, Any], answering: asyncio.Future[AnswerResult]) -> AnswerResult:
        """Send the prefill leg, and wait for the answer of the decode leg."""
        live, forwarding = self._live, self._forwarding
        params_json = orjson.dumps(params)
        body = prefill_body(forwarding.request.path, self._body, params_json, forwarding.other_fields)
        answer = AnswerSpec(forwarding.request.path, Use.PREFILL)
        sending = Sending(live.machine.instance_for(Leg.PREFILL), lambda: body, answer, on_sent=live.sent)
        prefilling = asyncio.ensure_future(forwarding.sender.send(sending))
        try:
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                result = await prefilling
                if result.failure is not None or result.status >= 400:
                    self.failed_leg = Leg.PREFILL
                    await _end(answering)
                    return result
                await live.prefill_ended()
                return await self._transferred(answering)
            return await answering
        finally:
            await _end(prefilling)

    async def _transferred(self, answering: asyncio.Future[AnswerResult]) -> AnswerResult:
        """The prefill leg has ended, so the last of the KV is being sent."""
        limit_s = self._live.machine.kv_within_s
        await asyncio.wait((answering,), timeout=limit_s)
        if limit_s is None or answering.done() or self._forwarding.part.has_begun:
            return await answering
        return AnswerResult(failure=stuck_transfer(limit_s))

    async def _answer(self, metaserver_url: str) -> AnswerResult:
        forwarding = self._forwarding
        place = params_field(layerwise_decode_params(metaserver_url))
        target = self._live.machine.instance_for(Leg.DECODE)
        sending = forwarding.to_client(target, (place,), self._live.first_token, Use.DECODED)
        return await forwarding.sender.send(sending)


async def _end(leg: asyncio.Future[AnswerResult]) -> None:
    """Abort a leg that is still under way."""
    if not leg.done():
        leg.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leg
