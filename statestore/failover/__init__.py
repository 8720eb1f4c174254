"""Routing without Redis: pools that fall back to a local state and converge when the store is back."""

from statestore.failover.pool import FailoverPool, FailoverStore

__all__ = ["FailoverPool", "FailoverStore"]
