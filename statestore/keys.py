"""The names of everything in Redis. Nothing else names a key; docs/reference/redis-keys.md describes what is in them.

The pool is the hash tag, so that one pool lives on one shard of a cluster and a script may touch all its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

KEY_NAMES: Final[Mapping[str, str]] = {
    "meta": "meta",
    "instances": "instances",
    "replicas": "replicas",
    "subscribers": "subscribers",
    "leader": "leader",
    "learned": "learned",
    "settings": "settings",
    "settings_history": "settings:history",
    "hotness_tree": "hotness:tree",
    "arrivals": "arrivals",
    "samples": "samples",
    "rebalance_wanted": "rebalance:wanted",
    "scaling": "scaling",
    "scaling_log": "scaling:log",
    "migrations": "migrations",
    "least_loaded": "least_loaded:",
    "prefixes_new": "prefixes:new",
    "prefixes_old": "prefixes:old",
    "responses_new": "responses:new",
    "responses_old": "responses:old",
    "grants": "grants:",
    "request": "request:",
    "instance": "instance:",
    "queue": "queue:",
    "running": "running:",
    "kv": "kv:",
    "kv_events": "kv_events:",
    "kv_names": "kv_names:",
}
"""What follows the pool, for Python and for the scripts; an id or a role follows a colon. ``grants`` is a channel and
no key."""


class InstanceKeys(NamedTuple):
    """The keys of one instance."""

    instance: bytes
    queue: bytes
    running: bytes
    kv: bytes


class PoolKeys:
    """The keys of one pool."""

    def __init__(self, prefix: str, pool: str) -> None:
        self.base = f"{prefix}:{{{pool}}}:".encode()
        """What all of them begin with: the one key that scripts are given."""
        self.meta = self._key("meta")
        self.instances = self._key("instances")
        self.replicas = self._key("replicas")
        self.leader = self._key("leader")
        self.learned = self._key("learned")
        self.settings = self._key("settings")
        self.settings_history = self._key("settings_history")
        self.hotness_tree = self._key("hotness_tree")
        self.arrivals = self._key("arrivals")
        self.samples = self._key("samples")
        self.rebalance_wanted = self._key("rebalance_wanted")
        self.scaling = self._key("scaling")
        self.scaling_log = self._key("scaling_log")
        self.migrations = self._key("migrations")
        self.prefixes = self._key("prefixes_new"), self._key("prefixes_old")
        self.responses = self._key("responses_new"), self._key("responses_old")
        self.subscribers = self._key("subscribers")

    def _key(self, name: str, of: str = "") -> bytes:
        return self.base + (KEY_NAMES[name] + of).encode()

    def request(self, request_id: str) -> bytes:
        return self._key("request", request_id)

    def instance(self, instance_id: str) -> InstanceKeys:
        return InstanceKeys(*[self._key(name, instance_id) for name in InstanceKeys._fields])

    def least_loaded(self, role: str) -> bytes:
        return self._key("least_loaded", role)

    def kv_events(self, instance_id: str) -> tuple[bytes, bytes]:
        """How far the KV events of an instance were read, and the names of its blocks."""
        return self._key("kv_events", instance_id), self._key("kv_names", instance_id)

    def grants_channel_of(self, replica_id: str) -> bytes:
        return self._key("grants", replica_id)
