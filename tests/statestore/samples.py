"""Requests, instances and chains that the store's tests speak of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import xxhash

from scheduling.chain import Chain
from scheduling.instance import InstanceSpec, InstanceState
from scheduling.settings import SchedulingSettings
from statestore.reservation import Reservation

BLOCK_TOKENS = 100
SCHEDULING = SchedulingSettings(policy="dualmap", queue_order="fifo", hotness_window_requests=100)


class HandClock:
    """The store's time, moved by hand."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms


def chain(*hashes: int, prompt_tokens: int | None = None) -> Chain:
    return Chain(hashes, BLOCK_TOKENS, prompt_tokens or BLOCK_TOKENS * len(hashes))


CHAIN = chain(11, 12, 13, 14)


def instance(instance_id: str, **changes: Any) -> InstanceSpec:
    """A ready instance with room for two requests of 400 uncached tokens."""
    spec = InstanceSpec(
        instance_id,
        f"http://{instance_id}:8000",
        state=InstanceState.READY,
        dispatch_window_tokens=800,
        max_running_requests=8,
        max_queued_requests=4,
    )
    return replace(spec, **changes)


def own_chain(request_id: str, prompt_tokens: int) -> Chain:
    """A prompt that no other request shares a block with."""
    blocks = max(1, prompt_tokens // BLOCK_TOKENS)
    hashes = [xxhash.xxh64_intdigest(f"{request_id} {block}".encode()) for block in range(blocks)]
    return Chain(tuple(hashes), BLOCK_TOKENS, prompt_tokens)


def reservation(request_id: str, instance_id: str = "a", **changes: Any) -> Reservation:
    """400 uncached tokens for ``instance_id``, asked by replica ``one``; without a ``chain``, nothing else."""
    uncached_tokens = changes.get("uncached_tokens", 400)
    made = Reservation(
        request_id=request_id,
        replica_id="one",
        instance_id=instance_id,
        chain=own_chain(request_id, uncached_tokens),
        uncached_tokens=uncached_tokens,
        expected_output_tokens=50,
        slo_ms=5000,
    )
    return replace(made, **changes)
