"""What an instance has done for overdue requests lately, ahead of those on time: a leaky bucket.

Every overdue request pours its prefill work in, and a constant share of the time runs out. So whoever keeps the bucket
from overflowing gives late work its capacity at once, and that share of an instance in the long run. Plain arithmetic,
so that the Lua twin in the state store agrees to the last digit.
"""

from __future__ import annotations

from scheduling.values import value


@value
class OverdueWork:
    """Milliseconds of prefill work as of ``at_ms`` of the store's clock."""

    work_ms: float = 0.0
    at_ms: int = 0

    def read(self, now_ms: int, share: float) -> float:
        """What is left now; a clock that stepped back lets nothing out."""
        return max(0.0, self.work_ms - max(0, now_ms - self.at_ms) * share)

    def after(self, work_ms: float, now_ms: int, share: float) -> OverdueWork:
        """With the work of one more overdue request."""
        return OverdueWork(self.read(now_ms, share) + work_ms, now_ms)
