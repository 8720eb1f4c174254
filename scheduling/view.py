"""A replica's copy of what changes rarely: members, rings and hotness tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState, Role
from scheduling.ring import VIRTUAL_NODES, DualRing


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One pool as of one membership epoch and one tree version. Replaced whole, never changed."""

    epoch: int
    """Grows with every change of membership or of an instance's state."""
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    """Every known instance by id, in any state."""
    ready: tuple[str, ...]
    """Ids of the ready, scheduled (mixed or prefill) instances, sorted."""
    rings: DualRing
    """The two rings over ``ready``."""
    tree: HotnessTree
    block_tokens: int | None = None
    """Tokens in one block of the instances' KV caches; None until one of them reported it. Of several sizes the most
    common one, the smallest of those: all replicas must cut prompts in the same way."""

    @classmethod
    def build(
        cls,
        *,
        epoch: int,
        tree_version: int,
        instances: Mapping[str, InstanceSpec],
        tree: HotnessTree,
        virtual_nodes: int = VIRTUAL_NODES,
        previous: ClusterView | None = None,
    ) -> ClusterView:
        """The view of these parts. With ``previous`` given only the anchors of changed members are computed;
        the rings are the same either way."""
        ready = tuple(sorted(instance_id for instance_id, spec in instances.items() if is_scheduled(spec)))
        rings = previous.rings if previous is not None else DualRing.of((), virtual_nodes)
        if rings.members != ready:
            rings = rings.with_members(ready)
        return cls(epoch, tree_version, instances, ready, rings, tree, _block_tokens(instances.values()))


def _block_tokens(instances: Iterable[InstanceSpec]) -> int | None:
    sizes = Counter(spec.block_tokens for spec in instances if spec.block_tokens)
    return min(sizes, key=lambda size: (-sizes[size], size), default=None)


def is_scheduled(spec: InstanceSpec) -> bool:
    """Whether the instance takes new requests from the policies; decode instances are the engine's business."""
    return spec.state is InstanceState.READY and spec.role is not Role.DECODE
