"""Redis 6.2 or newer and Valkey 7.2 or newer as servers of pools."""

from dualmap.statestore.redis.store import RedisStore

__all__ = ["RedisStore"]
