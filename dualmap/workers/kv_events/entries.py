"""The form of the entries that the store keeps of an engine's blocks, for the subscriber that takes over."""

from __future__ import annotations

import struct
from typing import Final

NAME: Final = struct.Struct(">cQ")
"""A tier, and the engine's name of a block, or the number of a cache group."""
KNOWN: Final = struct.Struct(">QI")
"""Two numbers. Of a device block: the fleet's hash, and the copies. Of a block in a pool: 0, and the copies. Of a block
with an adapter: the hash of the adapter's name, and the adapter's number. ``group_holdings`` has those of cache groups.
"""
