"""One try of a split request by a layerwise connector: the decode leg goes first, and asks for its prefill leg.

    decode sent ── it has memory ──▶ prefill sent ── layer by layer ──▶ first token ──▶ the client's answer
         └── failure ───────────────────┴── failure ──▶ another try; the other leg is aborted

Nothing is staged: the prefill instance sends KV to a decoder that waits for it. A leg that is aborted frees its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import orjson

from dualmap.router.connectors import layerwise_decode_params
from dualmap.router.decode_leg import DecodeLeg
from dualmap.router.http.attempt import ExchangeResult, never_asked, stuck_transfer
from dualmap.router.http.heads import Header
from dualmap.router.http.leg_answer import NO_CLIENT, PrefillExchange
from dualmap.router.http.leg_bodies import params_edit, prefill_body
from dualmap.router.http.sending import Sending
from dualmap.router.http.split_forward import Forwarding
from dualmap.router.lifecycle import SplitRequest


class LayerwiseTry:
    """Lives for one try."""

    def __init__(self, placed: SplitRequest, forwarding: Forwarding) -> None:
        self._placed = placed
        self._forwarding = forwarding
        self._body = forwarding.request.body  # of the prefill leg, which is made when the answer may have begun

    async def run(self) -> ExchangeResult:
        """With a failure if the request may be tried again."""
        placed = self._placed
        decode = placed.begin_decode()
        failure = await decode.place()
        if failure is not None:
            return ExchangeResult(failure=failure)
        asked = placed.metaserver.expect(placed.request_id)
        answering = asyncio.ensure_future(self._answer(decode))
        try:
            limit_s = placed.pool.settings.transfer_timeout_s
            await asyncio.wait((asked, answering), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                return await answering
            if not asked.done():
                return ExchangeResult(failure=never_asked(limit_s))
            return await self._prefill(decode, asked.result(), answering)
        finally:
            placed.metaserver.forget(placed.request_id)
            await _end(answering)

    async def _prefill(
        self, decode: DecodeLeg, params: dict[str, Any], answering: asyncio.Future[ExchangeResult]
    ) -> ExchangeResult:
        """Send the prefill leg, and wait for the answer of the decode leg."""
        placed, forwarding = self._placed, self._forwarding
        told = orjson.dumps(params)
        body = prefill_body(forwarding.request.path, self._body, told, forwarding.other_model)
        sending = Sending(placed, lambda: body, NO_CLIENT, list[Header], on_sent=placed.sent, exchange=PrefillExchange)
        prefilling = asyncio.ensure_future(forwarding.sender.send(sending))
        try:
            await asyncio.wait((prefilling, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                result = await prefilling
                if result.failure is not None or result.status >= 400:
                    await _end(answering)
                    await placed.drop_decode()
                    if result.failure is None:
                        forwarding.pass_on(result.as_error())
                    return result
                placed.prefill_done()
                return await self._transferred(decode, answering)
            return await answering
        finally:
            await _end(prefilling)

    async def _transferred(self, decode: DecodeLeg, answering: asyncio.Future[ExchangeResult]) -> ExchangeResult:
        """The prefill leg has ended, so the last of the KV is on its way."""
        limit_s = decode.kv_within_s
        await asyncio.wait((answering,), timeout=limit_s)
        if limit_s is None or answering.done() or self._forwarding.downstream.committed:
            return await answering
        return ExchangeResult(failure=stuck_transfer(limit_s))

    async def _answer(self, decode: DecodeLeg) -> ExchangeResult:
        forwarding, url = self._forwarding, self._placed.metaserver.url
        edit = params_edit(forwarding.request.body, layerwise_decode_params(url))
        sending = forwarding.to_client(
            decode,
            (edit,),
            awaits_output=True,
            exchange=forwarding.answer_exchange,
        )
        return await forwarding.sender.send(sending)


async def _end(leg: asyncio.Future[ExchangeResult]) -> None:
    """Abort a leg that is still under way."""
    if not leg.done():
        leg.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leg
