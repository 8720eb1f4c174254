"""The types of what fixtures do for a test of the workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dualmap.scheduling.placing.placement import PlaceStatus

AddInstance = Callable[..., Awaitable[None]]
"""Enters an instance."""
Reserve = Callable[..., Awaitable[PlaceStatus]]
"""Reserves tokens on an instance."""
