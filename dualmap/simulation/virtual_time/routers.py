"""The router replicas of a run, and who makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dualmap.simulation.virtual_time.simulated_replica import SimulatedReplica

Replica = TypeVar("Replica", bound=SimulatedReplica)


@dataclass(frozen=True, slots=True)
class Routers:
    """Requests come to the replicas in turn."""

    replicas: Sequence[SimulatedReplica]
    read: Callable[[], None] | None = None
    """Reads the gauges of all instances; None: they are not read at intervals."""
    reading_interval_s: float = 1.0


class MakeReplica(Protocol):
    """Makes a replica of the run."""

    def __call__(self, kind: type[Replica]) -> Replica: ...


class RoutersOf(Protocol):
    """Makes the replicas of a run that share no store, before the run."""

    def __call__(self, make: MakeReplica, kv_used_tokens: Callable[[], Mapping[str, int]]) -> Routers:
        """``kv_used_tokens`` are the engines' gauges by instance, at the moment of the call."""
