"""Targets of a goodput: how many requests have to be on time, and by which SLOs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dualmap.research.figures import Figures
from dualmap.simulation.errors import SimulationError


@dataclass(frozen=True, slots=True)
class Target:
    """A share of requests, in one figure of a run."""

    name: str
    """Name as a suite lists it."""
    figure: str
    share: float
    title: str
    """Title as reports write it."""

    def share_of(self, figures: Figures) -> float:
        share: float = getattr(figures, self.figure)
        return share


MAIN = Target("90", "on_time", 0.90, "90 % on time")
"""The paper's. Saturation is a goodput of this target."""
BOTH = Target("both", "both_slos", 0.90, "90 % within both SLOs")
TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            MAIN,
            Target("95", "on_time", 0.95, "95 % on time"),
            Target("99", "on_time", 0.99, "99 % on time"),
            BOTH,
            Target("both50", "both_tight", 0.90, "90 % on time and within 50 ms a token"),
        )
    }
)


def targets_of(names: tuple[str, ...]) -> tuple[Target, ...]:
    """The main target, then the others named. Raises SimulationError."""
    for name in names:
        if name not in TARGETS:
            raise SimulationError(f"unknown target {name!r}; known are {', '.join(TARGETS)}")
    return (MAIN, *(TARGETS[name] for name in dict.fromkeys(names) if name != MAIN.name))
