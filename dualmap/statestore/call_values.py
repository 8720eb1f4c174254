"""Arguments and replies of a pool's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from dualmap.scheduling.estimates.kv_tiers import InstanceTiers
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.queues.queue_order import QueueHead
from dualmap.scheduling.revisions.rollout import Rollout
from dualmap.scheduling.revisions.weights import NO_WEIGHTS, RevisionWeights
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.values import documented, value
from dualmap.statestore.kv_views import KvEventRecord
from dualmap.statestore.leases import Lease, ReplicaInfo


@dataclass(frozen=True, slots=True)
class Membership:
    """The part of the state that replicas keep a copy of."""

    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    tree: HotnessTree
    learned: Learned
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Scheduling settings that were changed in the running fleet, by dotted name."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Model names that operators added in the running fleet: "" for another name of the pool's model, else ``lora``."""
    _: KW_ONLY
    adapters: Mapping[str, RegisteredAdapter] = field(default_factory=dict)
    """Adapters that were registered in the running fleet, those that were unloaded among them."""
    revisions: RevisionWeights = NO_WEIGHTS
    rollout: Rollout | None = None
    """The rollout that runs, or the last one."""


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """One change of scheduling settings in the running fleet."""

    at_ms: int
    by: str
    changes: Mapping[str, Any]
    """Changed settings by dotted name; None: back to the configured value."""


@dataclass(frozen=True, slots=True)
class Note:
    """A complaint about an instance, in words."""

    text: str
    since_ms: int


@value
class DiscoveryStatus:
    """How discovery goes, as the leader last reported it."""

    at_ms: int = documented("when this was written, which is at every change of it", default=0)
    by: str = documented("worker that discovers", default="")
    source: str = documented("what it looks at", default="")
    state: str = documented(
        "`starting` (nothing listed yet), `watching`, or `failing`: what was found last stays", default=""
    )
    detail: str = documented("what fails, in words", default="")
    _: KW_ONLY
    pods: int = documented("pods that were found", default=0)
    serving: int = documented("instances of these that serve", default=0)
    left_out: tuple[str, ...] = documented("what is not entered, and why; 20 at most", default=())


@value
class Transition:
    """The result of a transition, and the queue of its instance where that has room now. Where releases share a call,
    the last one of an instance has its queue."""

    done: bool
    queue: QueueHead | None = None


@dataclass(frozen=True, slots=True)
class RunMemory:
    """The memory that agents' runs have, and the turns that wait for it."""

    used_tokens: int = 0
    """Tokens of the working sets of active runs."""
    capacity_tokens: int = 0
    """KV memory of the instances, as last reported by a replica; 0: no turn of a run was entered yet."""
    waiting_turns: int = 0


@dataclass(frozen=True, slots=True)
class PoolOverview:
    """A pool's loads, replicas and leader, without its requests: its cost grows with the number of instances alone."""

    now_ms: int
    loads: Mapping[str, InstanceLoad]
    """Loads of all members, by id in id order, without hits."""
    replicas: tuple[ReplicaInfo, ...]
    leader: Lease | None
    migrations: Mapping[str, int]
    """Migrated requests by reason, since the pool began."""
    notes: Mapping[str, Note]
    """Complaints about instances, by id, as their last health check found; most have none."""
    tiers: Mapping[str, InstanceTiers] = field(default_factory=dict, kw_only=True)
    """The tiers of each instance that has some."""
    doubts: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Why the cache of an instance is not known exactly, by id, of those whose KV events are followed or were."""
    runs: RunMemory = field(default_factory=RunMemory, kw_only=True)


@dataclass(frozen=True, slots=True)
class PoolSnapshot(PoolOverview):
    """Everything about a pool, for people and metrics. Not a hot-path call."""

    _: KW_ONLY
    epoch: int
    tree_version: int
    instances: Mapping[str, InstanceSpec]
    requests: tuple[StoredRequest, ...]
    """Live requests, those first reserved first; in a large pool they are not all of one moment."""
    kv_views: Mapping[str, KvEventRecord]
    """How far the KV events of each instance are followed."""

    def requests_of(self, replica_id: str) -> Sequence[StoredRequest]:
        return [request for request in self.requests if request.replica_id == replica_id]
