"""One pool's state as a synchronous state machine in memory.

``PoolLedger`` is what the in-memory store wraps, what a replica falls back to while Redis is away, and what the
simulator drives in virtual time. Every rule in here has a twin in ``statestore/lua``; the property tests drive
both in lockstep.
"""

from statestore.ledger.leadership import Leadership
from statestore.ledger.pool import PoolLedger
from statestore.ledger.replicas import ReplicaLeases

__all__ = ["Leadership", "PoolLedger", "ReplicaLeases"]
