"""When a lease has run out."""

from __future__ import annotations


def lease_runs(expires_ms: int, lease_ms: int, now_ms: int) -> bool:
    """Whether a lease of that length that ends then is good now.

    One with more than twice its length left was taken before the store's clock was set back. It has run out as well, or
    a dead owner would keep it until the clock has caught up. A step of less than the length ends nobody's: a living
    owner renews its lease soon, a dead one's lasts that much longer. The Lua twin is ``shared/lease.lua``.
    """
    return 0 < expires_ms - now_ms <= 2 * lease_ms
