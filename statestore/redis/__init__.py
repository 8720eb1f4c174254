"""The store on Redis 6.2 or newer and Valkey 7.2 or newer."""

from statestore.redis.pool import RedisPool
from statestore.redis.store import RedisStore

__all__ = ["RedisPool", "RedisStore"]
