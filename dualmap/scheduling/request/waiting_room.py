"""The wait for the first instance of a pool that may have none: how many requests wait, and for how long at most."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings


@dataclass(slots=True)
class WaitingRoom:
    """The requests of one replica that wait for the first instance of a pool.

    A request that finds no instance wakes the pool, so that what waits is what the autoscaler is to see.
    """

    limit: int
    """Requests that may wait; one more is refused."""
    within_s: float
    """The longest wait."""
    waiting: int = 0

    @classmethod
    def of(cls, autoscale: AutoscaleSettings | None) -> WaitingRoom | None:
        """The room of a pool; None for one that is to have an instance at all times, or whose size is not decided."""
        if autoscale is None or autoscale.min_instances > 0:
            return None
        return cls(autoscale.max_waiting, autoscale.gives_up_s)

    @property
    def is_full(self) -> bool:
        return self.waiting >= self.limit

    def enter(self) -> None:
        self.waiting += 1

    def leave(self) -> None:
        self.waiting -= 1
