"""The store for one process alone: the scripts of production, on a server within the process."""

from dualmap.statestore.memory.store import MemoryStore, wall_clock_ms

__all__ = ["MemoryStore", "wall_clock_ms"]
