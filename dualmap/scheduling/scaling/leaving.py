"""The choice of the instance that leaves: the one whose leaving costs the fleet least.

Three things are lost with it. What it holds moves, and waits elsewhere. What runs on it keeps a machine paid until it
ends. And prefixes that no other instance has are computed again when a request needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dualmap.scheduling.state.instance import InstanceLoad

REUSE_SHARE = 0.2
"""Share of the blocks that only one instance has, among the recent ones, that is assumed to be requested again."""
RUNNING_S = 0.5
"""Cost of a running request, in seconds of prefill work: its answer delays the end of the drain."""


def plan_leaving(
    loads: Mapping[str, InstanceLoad],
    recent_blocks: Mapping[str, Sequence[int]],
    block_tokens: int,
    count: int = 1,
) -> tuple[str, ...]:
    """``count`` of the instances of ``loads``, those of least cost first.

    ``recent_blocks`` are the blocks that were last used on each, by hash; an instance without any counts as empty.
    """
    holders = Counter(block for blocks in recent_blocks.values() for block in set(blocks))
    costs = {}
    for name, load in loads.items():
        alone = sum(holders[block] == 1 for block in set(recent_blocks.get(name, ())))
        recompute_s = REUSE_SHARE * alone * block_tokens / load.prefill_tokens_per_s
        moved_s = load.pending_tokens / load.prefill_tokens_per_s
        costs[name] = recompute_s + moved_s + RUNNING_S * load.running_requests
    return tuple(sorted(costs, key=lambda name: (costs[name], name))[:count])


def ordinal_of(instance_id: str) -> int:
    """The number at the end of a pod's name, which is the instance's id up to a port or a rank; -1 where there is
    none. Workloads that number their pods remove the highest one first."""
    _, _, number = instance_id.partition(":")[0].rpartition("-")
    return int(number) if number.isdecimal() else -1


def plan_leaving_in_order(instance_ids: Iterable[str], count: int = 1) -> tuple[str, ...]:
    """``count`` of the instances, those with the highest numbers, the highest first."""
    return tuple(sorted(instance_ids, key=lambda name: (-ordinal_of(name), name))[:count])
