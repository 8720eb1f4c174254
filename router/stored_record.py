"""The record of a live request: what the store should know of it, if it has lost it."""

from __future__ import annotations

from typing import Protocol

from dualmap.router.prompt import ReadPrompt
from dualmap.scheduling.placing.placement import Placed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.request import Request, RequestState


class Recorded(Protocol):
    request_id: str
    instance_id: str
    store_attempt: int
    chain: Chain
    prompt: ReadPrompt
    slo_s: float

    @property
    def asked_name(self) -> str:
        """See ``scheduling.state.view.ClusterView.asked_name``."""

    @property
    def age_s(self) -> float: ...

    @property
    def shows_first_token(self) -> bool: ...


def stored_record(
    request: Recorded, placed: Placed, state: RequestState, replica_id: str, uncached_tokens: int, now_ms: int
) -> Request:
    """The record of a request that was ``placed``, and is in this state by now."""
    decision, dispatched = placed.decision, state is not RequestState.HELD
    moved = dispatched and request.instance_id != decision.instance_id
    return Request(
        request_id=request.request_id,
        replica_id=replica_id,
        instance_id=request.instance_id if dispatched else decision.instance_id,
        state=state,
        attempt=request.store_attempt,
        uncached_tokens=uncached_tokens if dispatched else decision.uncached_tokens,
        prompt_tokens=request.chain.prompt_tokens,
        expected_output_tokens=request.prompt.expected_output_tokens,
        slo_ms=round(request.slo_s * 1000),
        enqueued_ms=now_ms - round(request.age_s * 1000),
        dispatched_ms=now_ms if dispatched else 0,
        prefilled_ms=now_ms if state is RequestState.PREFILLED and request.shows_first_token else 0,
        alternative_id=decision.instance_id if moved else decision.alternative_id,
        alternative_uncached_tokens=decision.uncached_tokens if moved else decision.alternative_uncached_tokens,
        leg=placed.reply.leg,
        stored_tokens=request.prompt.stored_tokens,
        model=request.asked_name,
    )
