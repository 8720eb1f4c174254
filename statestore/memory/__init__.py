"""The store for one process alone, and the state machine that the simulator drives."""

from statestore.memory.pool import MemoryPool, MemoryStore, wall_clock_ms
from statestore.memory.state import PoolState

__all__ = ["MemoryPool", "MemoryStore", "PoolState", "wall_clock_ms"]
