"""A placement that goes where a test says."""

from __future__ import annotations

import zlib
from dataclasses import fields, replace
from typing import Any

from dualmap.scheduling.estimates.weights import PLAIN_TTFT, Form, Weights
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import Placement, Queueing
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest

WEIGHED = tuple(each.name for each in fields(Weighing))
QUEUED = tuple(each.name for each in fields(Queueing))
_MISSED = Form(constant=1e9)
"""An expected TTFT that no SLO allows."""


def placement(
    request_id: str, instance_id: str = "a", tokens: int = 1000, *, other: str | None = None,
    hashes: tuple[int, ...] = (), block_tokens: int = 128, replica_id: str = "replica-1", attempt: int = 1,
    output_tokens: int = 64, slo_ms: int = 5000, rank_ms: int = 0, overloaded: bool = False,
) -> Placement:  # fmt: skip
    """A request with ``tokens`` of a prompt of its own for the instance, and ``other`` as its next best; one that is
    ``overloaded`` is expected to miss its SLO, and asks for a rebalance."""
    request = StoredRequest(
        request_id,
        replica_id,
        "",
        RequestState.HELD,
        attempt,
        uncached_tokens=0,
        prompt_tokens=tokens,
        expected_output_tokens=output_tokens,
        slo_ms=slo_ms,
    )
    chain = Chain(hashes or (zlib.crc32(request_id.encode()),), block_tokens, tokens)
    named = (instance_id,) if other is None else (instance_id, other)  # all cost the same: the first is taken
    weights = Weights(Form(), _MISSED if overloaded else PLAIN_TTFT)
    queueing = Queueing(rank_ms, rebalances=overloaded)
    return Placement(request, chain, Weighing(Leg.WHOLE, named, weights), queueing=queueing)


def changed(placement: Placement, **changes: Any) -> Placement:
    """The placement with other fields, of its own or of what it has."""
    weighed = {name: changes.pop(name) for name in WEIGHED if name in changes}
    queued = {name: changes.pop(name) for name in QUEUED if name in changes}
    weighing, queueing = replace(placement.weighing, **weighed), replace(placement.queueing, **queued)
    return replace(placement, weighing=weighing, queueing=queueing, **changes)
