"""The state of a pool, on any server: Redis elsewhere, or one within the process."""

from dualmap.statestore.pool.pool_store import PoolStore

__all__ = ["PoolStore"]
