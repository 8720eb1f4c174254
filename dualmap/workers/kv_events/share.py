"""The share of each worker in reading events of instances: rendezvous hashing over the living workers.

Every worker computes the same. A worker that comes or goes moves its own share alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash


def reader_of(instance_id: str, workers: Sequence[str]) -> str:
    """The worker of the highest hash; ``workers`` must not be empty."""
    return max(workers, key=lambda worker: (xxhash.xxh3_64_intdigest(f"{instance_id}#{worker}".encode()), worker))


def share_of(worker_id: str, instance_ids: Iterable[str], workers: Sequence[str]) -> frozenset[str]:
    """Instances whose events this worker reads."""
    if not workers:
        return frozenset()
    return frozenset(name for name in instance_ids if reader_of(name, workers) == worker_id)
