"""The names of everything in Redis. Nothing else names a key; docs/reference/redis-keys.md describes what is in them.

The pool is the hash tag, so that one pool lives on one shard of a cluster and a script may touch all its keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final


class _Key:
    """One key of the pool."""

    def __init__(self, text: str) -> None:
        """``text`` is what follows the pool."""
        self.text = text

    def __get__(self, keys: PoolKeys, _: type) -> bytes:
        return keys.base + self.text.encode()


class _KeyOf(_Key):
    """A key for each instance, request, role, replica or day, whose name follows."""

    def __get__(self, keys: PoolKeys, _: type) -> Callable[[str], bytes]:  # type: ignore[override]
        return lambda name: keys.base + (self.text + name).encode()


class PoolKeys:
    """The keys of one pool."""

    meta = _Key("meta")
    instances = _Key("instances")
    instance_records = _Key("instances:records")
    instance_notes = _Key("instances:notes")
    instance_tiers = _Key("instances:tiers")
    replicas = _Key("replicas")
    subscribers = _Key("subscribers")
    leader = _Key("leader")
    learned = _Key("learned")
    names = _Key("names")
    adapter_records = _Key("adapter_records")
    adapter_failures = _Key("adapter_records:failures")
    settings = _Key("settings")
    settings_history = _Key("settings:history")
    hotness_tree = _Key("hotness:tree")
    arrivals = _Key("arrivals")
    samples = _Key("samples")
    instance_links = _Key("instances:links")
    rebalance_wanted = _Key("rebalance:wanted")
    books = _Key("books")
    budgets_allotted = _Key("budgets:allotted")
    budgets_wanted = _Key("budgets:wanted")
    former_budgets = _Key("budgets")
    former_shares = _Key("shares")
    """Books of tenants as schema 1 kept them (``statestore.pool.former_books``)."""
    usage_log = _Key("usage:log")
    usage_lost = _Key("usage:lost")
    passed_on = _Key("passed_on")
    shares_active = _Key("shares:active")
    scaling = _Key("scaling")
    scaling_decode = _Key("scaling:decode")
    scaling_log = _Key("scaling:log")
    discovery = _Key("discovery")
    chronicle = _Key("chronicle")
    chronicle_samples = _Key("chronicle:samples")
    chronicle_happened = _Key("chronicle:happened")
    members_history = _Key("instances:history")
    migrations = _Key("migrations")
    prefixes_new = _Key("prefixes:new")
    prefixes_old = _Key("prefixes:old")
    responses_new = _Key("responses:new")
    responses_old = _Key("responses:old")
    revisions = _Key("revisions")
    revisions_history = _Key("revisions:history")
    homes_new = _Key("revisions:homes:new")
    homes_old = _Key("revisions:homes:old")
    runs = _Key("runs")
    run_turns = _Key("runs:turns")
    runs_seen = _Key("runs:seen")
    runs_silent = _Key("runs:silent")
    runs_waiting = _Key("runs:waiting")
    runs_on_time = _Key("runs:on_time")
    runs_latest = _Key("runs:latest")
    runs_late = _Key("runs:late")
    contexts_new = _Key("runs:contexts:new")
    contexts_old = _Key("runs:contexts:old")
    run = _KeyOf("run:")
    least_loaded = _KeyOf("least_loaded:")
    usage = _KeyOf("usage:")
    request = _KeyOf("request:")
    queue = _KeyOf("queue:")
    running = _KeyOf("running:")
    queue_log = _KeyOf("queue_log:")
    kv = _KeyOf("kv:")
    kv_tier = _KeyOf("kv_tier:")
    adapters = _KeyOf("adapters:")
    kv_events = _KeyOf("kv_events:")
    kv_names = _KeyOf("kv_names:")
    grants = _KeyOf("grants:")
    """A channel, and no key."""
    turns = _KeyOf("turns:")
    """A channel, and no key."""

    def __init__(self, prefix: str, pool: str) -> None:
        self.pool = pool
        self.base = f"{prefix}:{{{pool}}}:".encode()
        """Common beginning of the pool's keys: the one key that scripts are given."""


class FleetKeys(PoolKeys):
    """The keys that are of no single pool. They lie as those of a pool of this name would, which has none of them."""

    tenants = _Key("tenants")
    tenants_meta = _Key("tenants:meta")
    tenants_history = _Key("tenants:history")
    tenants_allotments = _Key("tenants:allotments")
    batches = _KeyOf("batches:of:")
    batch_files = _KeyOf("batches:files:")
    batch_owners = _Key("batches:owners")
    batches_unnamed = _Key("batches:unnamed")
    batches_open = _Key("batches:open")
    batch_lines = _Key("batches:lines")
    batch_claims = _KeyOf("batches:claims:")
    batch_done = _KeyOf("batches:done:")

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix, "fleet")


KEY_NAMES: Final[Mapping[str, str]] = {
    name: each.text for name, each in vars(PoolKeys).items() if isinstance(each, _Key)
}
"""Names of the keys behind the pool's prefix, for the scripts."""
