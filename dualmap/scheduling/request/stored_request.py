"""Records of a live request, for a store that lost it."""

from __future__ import annotations

from dataclasses import replace

from dualmap.scheduling.request.machine import ON_AN_INSTANCE, PREFILL_UNDER_WAY, Phase, RequestMachine
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest

_STATES = {
    Phase.HELD: RequestState.HELD,
    **dict.fromkeys(ON_AN_INSTANCE | {Phase.BROKEN_OFF}, RequestState.PREFILLED),
    **dict.fromkeys(PREFILL_UNDER_WAY, RequestState.DISPATCHED),
}
"""The state in which the store should have a request. In any other phase it has no reservation, or one that is being
made or released."""


def stored_requests(machine: RequestMachine, now_ms: int, now_s: float) -> tuple[StoredRequest, ...]:
    """The records of a live request, at ``now_ms`` of the store's clock: one for each leg that is reserved."""
    if machine.spec.chain is None:
        return (machine.register_record(),) if machine.registered and not machine.is_done else ()
    found = (_own_record(machine, now_ms, now_s), _decode_record(machine, now_ms, now_s))
    return tuple([record for record in found if record is not None])


def _own_record(machine: RequestMachine, now_ms: int, now_s: float) -> StoredRequest | None:
    placed, state, decode = machine.placed, _STATES.get(machine.phase), machine.decode
    if machine.is_kept:
        return machine.kept_record()
    if placed is None or state is None or (decode is not None and decode.answered):
        return None
    decision, dispatched = placed.decision, state is not RequestState.HELD
    moved = dispatched and machine.instance_id != decision.instance_id
    seen = machine.shows_first_token
    assert machine.searched is not None
    return replace(
        machine.searched,
        instance_id=machine.instance_id if dispatched else decision.instance_id,
        state=state,
        attempt=machine.attempt,
        uncached_tokens=machine.uncached_tokens if dispatched else decision.uncached_tokens,
        enqueued_ms=now_ms - round(machine.queued_for_s(now_s) * 1000),
        dispatched_ms=now_ms if dispatched else 0,
        prefilled_ms=now_ms if state is RequestState.PREFILLED and seen else 0,
        alternative_id=decision.instance_id if moved else decision.alternative_id,
        alternative_uncached_tokens=decision.uncached_tokens if moved else decision.alternative_uncached_tokens,
        leg=placed.reply.chosen.leg,
    )


def _decode_record(machine: RequestMachine, now_ms: int, now_s: float) -> StoredRequest | None:
    decode, chain = machine.decode, machine.chain()
    if decode is None or decode.target is None or chain is None or machine.phase not in _STATES:
        return None
    return replace(
        machine.decode_record(chain),
        instance_id=decode.target.instance_id,
        state=RequestState.PREFILLED,
        uncached_tokens=chain.prompt_tokens - decode.cached_tokens,
        enqueued_ms=now_ms - round(machine.queued_for_s(now_s) * 1000),
        dispatched_ms=now_ms,
        leg=Leg.DECODE,
    )
