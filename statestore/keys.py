"""The names of everything in Redis. Nothing else formats a key; docs/redis-keys.md describes what is in them.

The pool is the hash tag, so that one pool lives on one shard of a cluster and a script may touch all its keys.
"""

from __future__ import annotations

from typing import NamedTuple


class AccountKeys(NamedTuple):
    """The keys of one instance, in the order in which scripts take them."""

    account: bytes
    queue: bytes
    running: bytes
    kv: bytes
    late: bytes

    @property
    def of_load(self) -> tuple[bytes, ...]:
        """Those that a load is read from: all but the last."""
        return self[:4]


class PoolKeys:
    """The keys of one pool; those of an instance are made once."""

    def __init__(self, prefix: str, pool: str) -> None:
        self._base = f"{prefix}:{{{pool}}}:"
        self.meta = self._key("meta")
        self.instances = self._key("instances")
        self.requests = self._key("requests")
        self.replicas = self._key("replicas")
        self.leader = self._key("leader")
        self.hotness_tree = self._key("hotness:tree")
        self.arrivals = self._key("arrivals")
        self.wanted_rebalances = self._key("rebalance:wanted")
        self.migrations = self._key("migrations")
        self.lightest = self._key("lightest")
        """Scripts that write an account take it as their last key."""
        self.chains = self._key("chains")
        self.granting = (self.chains, self.lightest)
        """Scripts that may grant held requests take these as their last keys."""
        self.holders = (self._key("holders:new"), self._key("holders:old"))
        self._accounts: dict[str, AccountKeys] = {}

    def _key(self, name: str) -> bytes:
        return (self._base + name).encode()

    def account(self, instance_id: str) -> AccountKeys:
        keys = self._accounts.get(instance_id)
        if keys is None:
            keys = AccountKeys(
                self._key(f"instance:{instance_id}"),
                self._key(f"queue:{instance_id}"),
                self._key(f"running:{instance_id}"),
                self._key(f"kv:{instance_id}"),
                self._key(f"late:{instance_id}"),
            )
            self._accounts[instance_id] = keys
        return keys

    def forget_account(self, instance_id: str) -> None:
        """Drop the cached names of a removed instance."""
        self._accounts.pop(instance_id, None)

    @property
    def grants_channel(self) -> bytes:
        """A replica's grants channel without the replica's id, which scripts append. Channels are no keys."""
        return self._key("grants:")

    def grants_channel_of(self, replica_id: str) -> bytes:
        return self.grants_channel + replica_id.encode()
