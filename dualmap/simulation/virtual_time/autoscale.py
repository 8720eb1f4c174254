"""A run whose fleet changes its size itself: by which settings and scaler. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings


@dataclass(frozen=True, slots=True)
class Autoscale:
    """How the fleet of a run scales itself."""

    settings: AutoscaleSettings
    scaler: str = "dualmap"
    """Name of the scaler, see ``simulation.virtual_time.scalers``."""
    options: tuple[tuple[str, float], ...] = ()
    """Parameters of another project's plan."""

    @property
    def most(self) -> int:
        """Instances that there are at most, decode instances included where they scale."""
        decode = self.settings.decode
        return self.settings.max_instances + (0 if decode is None else decode.max_instances)
