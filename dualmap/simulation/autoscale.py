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

    @property
    def most(self) -> int:
        """Instances that there are at most, decode instances included where they scale."""
        decode = self.settings.decode
        return self.settings.max_instances + (0 if decode is None else decode.max_instances)


@dataclass(frozen=True, slots=True)
class SizeChange:
    """One decision, on the decode instances where ``role`` says so, else on all others."""

    at_s: float
    size: int
    wanted: int
    reason: str
    role: str = ""
