"""Dual mapping: two consistent-hash rings that give every hash key two distinct instances.

Source: DualMap (ICLR 2026), dual mapping; consistent hashing after Karger et al., 1997. Two choices instead
of one shrink the worst overload from Θ(√(m log n / n)) to log log n.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

# One seed per ring. They are part of the mapping: changing one moves every key of every fleet.
VIRTUAL_NODES = 128
"""Anchor points of an instance on each ring."""
RING_SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


def _anchor_positions(instance_id: str, seed: int, virtual_nodes: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(f"{instance_id}#{node}".encode(), seed) for node in range(virtual_nodes)]


@dataclass(frozen=True, slots=True)
class Ring:
    """One consistent-hash ring: sorted anchor positions and, for each, the instance it belongs to."""

    seed: int
    virtual_nodes: int
    positions: array[int] = field(default_factory=lambda: array("Q"))
    """Positions, unboxed: a search among 64,000 numbers scattered over the heap would miss the caches at every step."""
    owners: tuple[str, ...] = ()

    def successor(self, key: int) -> str:
        """The instance at the first anchor clockwise of where ``key`` (64 bits) falls."""
        # ``position_of`` written out: every request looks up two.
        index = bisect_left(self.positions, xxhash.xxh3_64_intdigest(key.to_bytes(8, "big"), self.seed))
        return self.owners[index % len(self.owners)]

    def position_of(self, key: int) -> int:
        """The position of a key (64 bits) on this ring, 0..2**64-1."""
        return xxhash.xxh3_64_intdigest(key.to_bytes(8, "big"), self.seed)

    def owners_at(self, positions: Iterable[int]) -> list[str]:
        """The instance that each position belongs to: the first anchor clockwise of it. The ring must have one."""
        return [self.owners[bisect_left(self.positions, position) % len(self.owners)] for position in positions]

    def with_change(self, leaving: Iterable[str], joining: Iterable[str]) -> Ring:
        """The ring without ``leaving`` and with ``joining``; anchors of all others do not move.

        Costs a lookup per changed anchor and a copy of the rest, so adding or removing one instance among hundreds
        takes milliseconds.
        """
        positions, owners = self._without(leaving)
        anchors = sorted(
            (position, instance_id)
            for instance_id in joining
            for position in _anchor_positions(instance_id, self.seed, self.virtual_nodes)
        )
        merged_positions = array("Q")
        merged_owners: list[str] = []
        done = 0
        for position, owner in anchors:
            index = _insertion_index(positions, owners, position, owner)
            merged_positions += positions[done:index]
            merged_owners += owners[done:index]
            merged_positions.append(position)
            merged_owners.append(owner)
            done = index
        merged_positions += positions[done:]
        merged_owners += owners[done:]
        return Ring(self.seed, self.virtual_nodes, merged_positions, tuple(merged_owners))

    def among(self, members: Collection[str]) -> Ring:
        """The ring of some of its instances. Costs a look at every anchor, and computes none."""
        left = [index for index, owner in enumerate(self.owners) if owner in members]
        positions, owners = self.positions, self.owners
        return Ring(
            self.seed,
            self.virtual_nodes,
            array("Q", [positions[index] for index in left]),
            tuple([owners[index] for index in left]),
        )

    def _without(self, leaving: Iterable[str]) -> tuple[array[int], Sequence[str]]:
        gone = sorted(
            _insertion_index(self.positions, self.owners, position, instance_id)
            for instance_id in leaving
            for position in _anchor_positions(instance_id, self.seed, self.virtual_nodes)
        )
        if not gone:
            return self.positions, self.owners
        positions = array("Q")
        owners: list[str] = []
        done = 0
        for index in gone:
            positions += self.positions[done:index]
            owners += self.owners[done:index]
            done = index + 1
        positions += self.positions[done:]
        owners += self.owners[done:]
        return positions, owners


def _insertion_index(positions: Sequence[int], owners: Sequence[str], position: int, owner: str) -> int:
    """The index at which the anchor is, or belongs, in the order of (position, owner). Equal positions are ordered by
    id, so that rings of the same members are the same in whatever order members joined."""
    index = bisect_left(positions, position)
    while index < len(positions) and positions[index] == position and owners[index] < owner:
        index += 1
    return index


@dataclass(frozen=True, slots=True)
class DualRing:
    """Two rings with independent hash functions over the same members."""

    first: Ring
    second: Ring
    members: tuple[str, ...]
    """Ids of the members, sorted."""

    @classmethod
    def of(cls, members: Iterable[str], virtual_nodes: int = VIRTUAL_NODES) -> DualRing:
        """Rings over ``members``; the same members give the same rings in every process."""
        empty = cls(Ring(RING_SEEDS[0], virtual_nodes), Ring(RING_SEEDS[1], virtual_nodes), ())
        return empty.with_members(members)

    def with_members(self, members: Iterable[str]) -> DualRing:
        """The rings after a change of membership; only keys next to the changed anchors map elsewhere."""
        wanted, present = frozenset(members), frozenset(self.members)
        leaving, joining = present - wanted, wanted - present
        return DualRing(
            self.first.with_change(leaving, joining), self.second.with_change(leaving, joining), tuple(sorted(wanted))
        )

    def among(self, members: Collection[str]) -> DualRing:
        """The rings of some of the members; others are left out."""
        left = tuple([member for member in self.members if member in members])
        wanted = frozenset(left)
        return self if left == self.members else DualRing(self.first.among(wanted), self.second.among(wanted), left)

    def pair(self, key: int) -> tuple[str, ...]:
        """The candidate pair of a hash key: two distinct ids, one id with a single member, () with none.

        When both rings name the same instance, the second candidate is the next one in id order.
        """
        if len(self.members) < 2:
            return self.members
        first, second = self.first.successor(key), self.second.successor(key)
        if first == second:
            second = self.members[bisect_right(self.members, first) % len(self.members)]
        return (first, second)
