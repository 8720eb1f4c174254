"""The store for one process alone: the scripts of production, on a server within the process."""

from statestore.memory.at_once import AtOnce
from statestore.memory.store import MemoryStore, wall_clock_ms

__all__ = ["AtOnce", "MemoryStore", "wall_clock_ms"]
