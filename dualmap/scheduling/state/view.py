"""A replica's copy of what changes rarely: members, rings and hotness tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.state.hotness import HashKey, HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.legs import ROLES, Leg
from dualmap.scheduling.state.ring import VIRTUAL_NODES, DualRing


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
    _: KW_ONLY
    rings: DualRing
    """The two rings over ``ready``."""
    tree: HotnessTree
    block_tokens: int | None = None
    """Tokens in one block of the instances' KV caches; None until one of them reported it. Of several sizes the most
    common one, the smallest of those: all replicas must cut prompts in the same way."""
    roles: tuple[Role, ...] = (Role.MIXED,)
    """Roles of the ready instances, sorted."""
    decoding: ClusterView | None = None
    """View of the ready decode-capable instances, where requests can be split: some instance prefills alone, or decodes
    alone, and its counterpart is ready."""
    is_uniform: bool = True
    """All instances list the same model names, or none is known to list any: each serves every name."""
    has_ranks: bool = False
    """Some instance is a rank of a server that has several."""
    kv_capacity_tokens: int = 0
    """KV memory of the pool's ready instances, which its runs share, also of a view of some of them."""
    loaded_anywhere: frozenset[str] = frozenset()
    """Adapters that any instance serves, whether it lists them by now or not: their loads come with their requests."""
    _groups: dict[str, ClusterView] = field(default_factory=dict, repr=False, compare=False)
    """Views that ``serving`` has returned: made once for each requested name and revision, not for each request. Names
    that the same instances serve share one."""
    _ready_revisions: list[frozenset[str]] = field(default_factory=list, repr=False, compare=False)
    """What ``ready_revisions`` has returned, once it has."""
    _former_groups: Mapping[str, ClusterView] = field(default_factory=dict, repr=False, compare=False)
    """Groups of the view before, whose rings are changed rather than made."""

    @classmethod
    def build(
        cls,
        *,
        epoch: int,
        tree_version: int,
        instances: Mapping[str, InstanceSpec],
        tree: HotnessTree,
        loaded_anywhere: frozenset[str] = frozenset(),
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
            rings=_rings(ready, None if previous is None else previous.rings, virtual_nodes),
            tree=tree,
            block_tokens=_block_tokens(instances.values()),
            roles=_roles(ready, instances),
            is_uniform=_is_uniform(instances.values()),
            has_ranks=any(spec.data_parallel_rank is not None for spec in instances.values()),
            kv_capacity_tokens=sum(instances[name].kv_capacity_tokens for name in ready),
            loaded_anywhere=loaded_anywhere,
            _former_groups=_groups_of(previous),
        )
        if not (prefilling and decoding) or prefilling == decoding:
            return view
        rings = _rings(decoding, None if former is None else former.rings, virtual_nodes)
        return replace(view, decoding=replace(view, ready=decoding, rings=rings, roles=_roles(decoding, instances)))

    def key_of(self, chain: Chain) -> HashKey:
        """The hash key of a prompt, as this view has it."""
        tree = self.tree
        blocks = tree.key_blocks(chain)
        return HashKey(blocks, chain.prefix_hash(blocks), tree.hot_tokens(chain), self.epoch, self.tree_version)

    def of(self, leg: Leg) -> ClusterView:
        """The view of the instances that serve this leg."""
        return self if leg is Leg.PREFILL or self.decoding is None else self.decoding

    def serving(self, model: str, revision: str = "") -> ClusterView:
        """The view of the instances that serve a model name, see ``serving_model``; the view itself where all do. With
        a ``revision``, of those that are of it; of the others where none of it is ready."""
        if revision:
            return self._of_revision(model, revision)
        if self.is_uniform or not model or model in self.loaded_anywhere:
            return self
        group = self._groups.get(model)
        if group is None:
            group = self._groups[model] = self._group(model, serving_model(self.instances, model))
        return group

    def _of_revision(self, model: str, revision: str) -> ClusterView:
        among, name = self.serving(model), f"{revision}\n{model}"
        group = self._groups.get(name)
        if group is None:
            members = of_revision(among.instances, revision)
            group = self._groups[name] = among if not members else self._group(name, members)
        return group if group.ready else among

    @property
    def ready_revisions(self) -> frozenset[str]:
        """The revisions of ready instances."""
        found = self._ready_revisions
        if not found:
            found.append(frozenset([spec.revision_name for spec in self.instances.values() if is_ready(spec)]))
        return found[0]

    def ready_with(self, model: str) -> tuple[str, ...]:
        """The ready instances that have a model name by now, for what is not worth a load; those that serve it where
        none is known to have it."""
        if model in self.loaded_anywhere:
            having = tuple(name for name in self.ready if self.instances[name].lists(model))
            if having:
                return having
        return self.serving(model).ready

    def stored_name(self, model: str) -> str:
        """The name where only some of the instances serve it, else "": what a request for it says to the store."""
        return "" if self.is_uniform or self.serving(model) is self else model

    def _group(self, name: str, members: Mapping[str, InstanceSpec]) -> ClusterView:
        """The view of some instances; ``name`` is theirs among the groups."""
        if len(members) == len(self.instances):
            return self
        same = (group for group in self._groups.values() if group.instances.keys() == members.keys())
        return next(same, None) or ClusterView.build(
            epoch=self.epoch,
            tree_version=self.tree_version,
            instances=members,
            tree=self.tree,
            virtual_nodes=self.rings.first.virtual_nodes,
            previous=self._former_groups.get(name) or self._among(members.keys()),
        )

    def _among(self, members: Collection[str]) -> ClusterView:
        """The view with the rings of these members alone, taken from those of all rather than made."""
        decoding = None if self.decoding is None else self.decoding._among(members)
        return replace(
            self, rings=self.rings.among(members), decoding=decoding, _groups={}, _ready_revisions=[], _former_groups={}
        )


def serving_model(instances: Mapping[str, InstanceSpec], model: str) -> Mapping[str, InstanceSpec]:
    """The instances, in any state, that serve a model name: those that list it, and those whose list is not known.

    All of them where no list has the name, or where it is "": no list shows then who serves it, so the engine judges.
    An adapter that an engine loads at its first request is such a name.
    """
    if not model or not any(spec.lists(model) for spec in instances.values()):
        return instances
    return {name: spec for name, spec in instances.items() if spec.models is None or spec.lists(model)}


def of_revision(instances: Mapping[str, InstanceSpec], revision: str) -> Mapping[str, InstanceSpec]:
    """The instances of a revision, in any state; all of them by ""."""
    if not revision:
        return instances
    return {name: spec for name, spec in instances.items() if spec.revision_name == revision}


def takers(instances: Mapping[str, InstanceSpec], leg: Leg, model: str = "", revision: str = "") -> frozenset[str]:
    """The ready instances that serve the leg, the model name and the revision. Whole requests go to decode-capable
    ones, to others if there is none."""
    instances = of_revision(serving_model(instances, model), revision)
    if leg is Leg.PREFILL:
        return frozenset(_ready(instances, ROLES[leg]))
    return frozenset(_ready(instances, ROLES[Leg.DECODE]) or _ready(instances, ROLES[Leg.WHOLE]))


def _ready(instances: Mapping[str, InstanceSpec], roles: frozenset[Role]) -> tuple[str, ...]:
    return tuple(sorted(name for name, spec in instances.items() if is_ready(spec) and spec.role in roles))


def _groups_of(view: ClusterView | None) -> Mapping[str, ClusterView]:
    """Its groups without itself: that of a name which all instances serve. Each view would keep the one before it."""
    return {} if view is None else {name: group for name, group in view._groups.items() if group is not view}


def _rings(members: tuple[str, ...], former: DualRing | None, virtual_nodes: int) -> DualRing:
    rings = DualRing.of((), virtual_nodes) if former is None else former
    return rings if rings.members == members else rings.with_members(members)


def _roles(names: tuple[str, ...], instances: Mapping[str, InstanceSpec]) -> tuple[Role, ...]:
    return tuple(sorted({instances[name].role for name in names})) or (Role.MIXED,)


def _is_uniform(instances: Iterable[InstanceSpec]) -> bool:
    """Whether the lists of names are equal."""
    lists = iter([spec.models for spec in instances])
    first = next(lists, None)
    return all(each is first or each == first for each in lists)


def _block_tokens(instances: Iterable[InstanceSpec]) -> int | None:
    sizes = Counter(spec.block_tokens for spec in instances if spec.block_tokens)
    return min(sizes, key=lambda size: (-sizes[size], size), default=None)


def is_ready(spec: InstanceSpec) -> bool:
    """Whether the instance takes new requests."""
    return spec.state is InstanceState.READY


def is_scheduled(spec: InstanceSpec) -> bool:
    """Whether the instance takes new requests, and prefills."""
    return is_ready(spec) and spec.role is not Role.DECODE
