"""A replica's copy of what changes rarely: members, rings and hotness tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduling.hotness import HotnessTree
from scheduling.instance import InstanceSpec
from scheduling.ring import DualRing


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One pool as of one membership epoch and one tree version. Replaced whole, never changed."""

    epoch: int
    """Grows with every change of membership or of an instance's state."""
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    """Every known instance by id, whatever its state."""
    ready: tuple[str, ...]
    """Ids of the ready, scheduled (mixed or prefill) instances, sorted."""
    rings: DualRing
    """The two rings over ``ready``."""
    tree: HotnessTree
