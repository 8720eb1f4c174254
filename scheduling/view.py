"""A replica's copy of what changes rarely: members, rings and hotness tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec, InstanceState, Role
from scheduling.legs import ROLES, Leg
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
    """Ids of the ready prefill-capable instances, sorted; where there is none, of the decode-capable ones."""
    rings: DualRing
    """The two rings over ``ready``."""
    tree: HotnessTree
    block_tokens: int | None = None
    """Tokens in one block of the instances' KV caches; None until one of them reported it. Of several sizes the most
    common one, the smallest of those: all replicas must cut prompts in the same way."""
    roles: tuple[Role, ...] = (Role.MIXED,)
    """Of the ready instances, sorted."""
    decoding: ClusterView | None = None
    """The same over the ready decode-capable instances, where requests can be split: some instance prefills alone, or
    decodes alone, and its counterpart is ready."""

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
        prefilling, decoding = (_ready(instances, ROLES[leg]) for leg in (Leg.PREFILL, Leg.DECODE))
        ready, former = prefilling or decoding, None if previous is None else previous.decoding
        view = cls(
            epoch,
            tree_version,
            instances,
            ready,
            _rings(ready, None if previous is None else previous.rings, virtual_nodes),
            tree,
            _block_tokens(instances.values()),
            _roles(ready, instances),
        )
        if not (prefilling and decoding) or prefilling == decoding:
            return view
        rings = _rings(decoding, None if former is None else former.rings, virtual_nodes)
        return replace(view, decoding=replace(view, ready=decoding, rings=rings, roles=_roles(decoding, instances)))

    def of(self, leg: Leg) -> ClusterView:
        """The same over the instances that serve this leg."""
        return self if leg is Leg.PREFILL or self.decoding is None else self.decoding


def takers(instances: Mapping[str, InstanceSpec], leg: Leg) -> frozenset[str]:
    """The ready instances that serve the leg. Whole requests go to decode-capable ones, to others if there is none."""
    if leg is Leg.PREFILL:
        return frozenset(_ready(instances, ROLES[leg]))
    return frozenset(_ready(instances, ROLES[Leg.DECODE]) or _ready(instances, ROLES[Leg.WHOLE]))


def _ready(instances: Mapping[str, InstanceSpec], roles: frozenset[Role]) -> tuple[str, ...]:
    return tuple(sorted(name for name, spec in instances.items() if is_ready(spec) and spec.role in roles))


def _rings(members: tuple[str, ...], former: DualRing | None, virtual_nodes: int) -> DualRing:
    rings = DualRing.of((), virtual_nodes) if former is None else former
    return rings if rings.members == members else rings.with_members(members)


def _roles(names: tuple[str, ...], instances: Mapping[str, InstanceSpec]) -> tuple[Role, ...]:
    return tuple(sorted({instances[name].role for name in names})) or (Role.MIXED,)


def _block_tokens(instances: Iterable[InstanceSpec]) -> int | None:
    sizes = Counter(spec.block_tokens for spec in instances if spec.block_tokens)
    return min(sizes, key=lambda size: (-sizes[size], size), default=None)


def is_ready(spec: InstanceSpec) -> bool:
    """Whether the instance takes new requests."""
    return spec.state is InstanceState.READY


def is_scheduled(spec: InstanceSpec) -> bool:
    """Whether the instance takes new requests, and prefills."""
    return is_ready(spec) and spec.role is not Role.DECODE
