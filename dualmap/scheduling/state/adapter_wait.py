"""The wait of a request for its adapter on an instance, as a placement found it (``scheduling.estimates.adapters``)."""

from __future__ import annotations

from typing import Final, NamedTuple


class AdapterWait(NamedTuple):
    """Parts that cost differently: a load stops the engine, a request that waits for a slot waits alone. Times are as
    the instance's description has them."""

    host_s: float = 0.0
    """Time of the adapter's load from host memory onto the device."""
    disk_s: float = 0.0
    """Time of its load into host memory before that."""
    turns: float = 0.0
    """Time until it has a slot there, in answers."""


AT_HAND: Final = AdapterWait()
"""No wait: the adapter is on the device, or there is none."""
