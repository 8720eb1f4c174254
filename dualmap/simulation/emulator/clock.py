"""The engine's clock: the machine's, times a factor, and it can be stopped."""

from __future__ import annotations

from collections.abc import Callable


class EngineClock:
    """Engine seconds since the start, ``time_scale`` of them in one second of ``monotonic_s``."""

    def __init__(self, monotonic_s: Callable[[], float], time_scale: float) -> None:
        self.time_scale = time_scale
        self._monotonic_s = monotonic_s
        self._anchor_s = monotonic_s()
        self._engine_s = 0.0
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    def now_s(self) -> float:
        if self._paused:
            return self._engine_s
        return self._engine_s + (self._monotonic_s() - self._anchor_s) * self.time_scale

    def wall_delay_s(self, engine_time_s: float) -> float:
        """Seconds on the machine's clock until a moment of engine time; 0 when it has passed."""
        return max(0.0, (engine_time_s - self.now_s()) / self.time_scale)

    def pause(self) -> None:
        self._engine_s = self.now_s()
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            self._anchor_s = self._monotonic_s()
            self._paused = False
