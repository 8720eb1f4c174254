"""Errors of the state store; the drivers' own are translated once, at the connection."""

from __future__ import annotations


class StoreError(Exception):
    """Root of everything the state store raises."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, timed out or refuses writes. The call may or may not have taken effect."""


class LeaseLostError(StoreError):
    """The caller is no longer leader: stop the job, change nothing more."""


class StoreConfigurationError(StoreError):
    """The store URL or the server behind it cannot serve this fleet; says what to change."""


class StoreSchemaError(StoreConfigurationError):
    """Another version uses the pool, and this one must not run beside it; says what to do."""


class UnreadableStateError(StoreError):
    """Something in the store is not as this fleet writes it. The leader mends it soon (``statestore.pool.upkeep``)."""


class LimitsUnknownError(StoreUnavailableError):
    """The store is away, and with it what is used of limits."""
