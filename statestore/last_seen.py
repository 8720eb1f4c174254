"""Loads that were observed, kept without reading more of them than somebody asks for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from scheduling.instance import InstanceLoad


class UnreadLoads(Mapping[str, InstanceLoad]):
    """Loads by instance as a store replied them, each read the first time it is asked for."""

    __slots__ = ("_loads", "_read", "_replied")

    def __init__(self, replied: Mapping[str, Any], read: Callable[[str, Any], InstanceLoad]) -> None:
        self._replied = replied
        self._read = read
        self._loads: dict[str, InstanceLoad] = {}

    def __getitem__(self, instance_id: str) -> InstanceLoad:
        load = self._loads.get(instance_id)
        if load is None:
            load = self._loads[instance_id] = self._read(instance_id, self._replied[instance_id])
        return load

    def __iter__(self) -> Iterator[str]:
        return iter(self._replied)

    def __len__(self) -> int:
        return len(self._replied)


class LastSeenLoads:
    """Each instance's load as it was seen last: for estimates, never to decide."""

    def __init__(self) -> None:
        self._among: dict[str, Mapping[str, InstanceLoad]] = {}
        """By instance, the observation that showed it last."""

    def note(self, loads: Mapping[str, InstanceLoad]) -> None:
        """They were seen just now."""
        self._among.update(dict.fromkeys(loads, loads))

    def get(self, instance_id: str) -> InstanceLoad | None:
        among = self._among.get(instance_id)
        return None if among is None else among[instance_id]

    def all(self) -> dict[str, InstanceLoad]:
        return {instance_id: among[instance_id] for instance_id, among in self._among.items()}

    def forget_all_but(self, instance_ids: Collection[str]) -> None:
        """Drop the loads of instances that left the fleet."""
        for instance_id in self._among.keys() - instance_ids:
            del self._among[instance_id]
