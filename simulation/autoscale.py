"""A run whose fleet changes its size itself: how it does, and what it did. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings


@dataclass(frozen=True, slots=True)
class Autoscale:
    """How the fleet of a run scales itself."""

    settings: AutoscaleSettings
    scaler: str = "dualmap"
    """Name of the scaler, see ``simulation.scalers``."""
    options: tuple[tuple[str, float], ...] = ()
    """Parameters of another project's plan."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """One decision."""

    at_s: float
    size: int
    wanted: int
    reason: str
