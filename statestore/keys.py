"""The names of everything in Redis. Nothing else formats a key; docs/reference/redis-keys.md describes what is in them.

The pool is the hash tag, so that one pool lives on one shard of a cluster and a script may touch all its keys.
"""

from __future__ import annotations

from typing import NamedTuple


class InstanceKeys(NamedTuple):
    """The keys of one instance, in the order in which scripts take them."""

    instance: bytes
    queue: bytes
    running: bytes
    kv: bytes


class PoolKeys:
    """The keys of one pool; those of an instance are made once."""

    def __init__(self, prefix: str, pool: str) -> None:
        self._base = f"{prefix}:{{{pool}}}:"
        self.meta = self._key("meta")
        self.instances = self._key("instances")
        self.replicas = self._key("replicas")
        self.leader = self._key("leader")
        self.learned = self._key("learned")
        self.settings = self._key("settings")
        self.settings_history = self._key("settings:history")
        self.hotness_tree = self._key("hotness:tree")
        self.arrivals = self._key("arrivals")
        self.samples = self._key("samples")
        self.wanted_rebalances = self._key("rebalance:wanted")
        self.migrations = self._key("migrations")
        self.least_loaded = self._key("least_loaded")
        self.prefixes = (self._key("prefixes:new"), self._key("prefixes:old"))
        self.grants_channel = self._key("grants:")
        """A replica's grants channel without the replica's id, which scripts append. Channels are no keys."""
        self.subscribers = self._key("subscribers")
        self._request_base = self._key("request:")
        self._instances: dict[str, InstanceKeys] = {}

    def _key(self, name: str) -> bytes:
        return (self._base + name).encode()

    def request(self, request_id: str) -> bytes:
        return self._request_base + request_id.encode()

    def instance(self, instance_id: str) -> InstanceKeys:
        keys = self._instances.get(instance_id)
        if keys is None:
            keys = self._instances[instance_id] = InstanceKeys(
                self._key(f"instance:{instance_id}"),
                self._key(f"queue:{instance_id}"),
                self._key(f"running:{instance_id}"),
                self._key(f"kv:{instance_id}"),
            )
        return keys

    def kv_events(self, instance_id: str) -> tuple[bytes, bytes]:
        """How far the KV events of an instance were read, and the names of its blocks."""
        return self._key(f"kv_events:{instance_id}"), self._key(f"kv_names:{instance_id}")

    def forget_instance(self, instance_id: str) -> None:
        """Drop the cached names of a removed instance."""
        self._instances.pop(instance_id, None)

    def grants_channel_of(self, replica_id: str) -> bytes:
        return self.grants_channel + replica_id.encode()
