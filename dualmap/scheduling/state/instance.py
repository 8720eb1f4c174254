"""An instance as the scheduler knows it: its fixed description and its load at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from enum import StrEnum
from operator import attrgetter
from typing import Final, Protocol

from dualmap.scheduling.state.adapter_wait import AT_HAND, AdapterWait
from dualmap.scheduling.state.tier_load import NO_LOAD, TierLoad
from dualmap.scheduling.values import documented, value

UNLABELLED: Final = "unlabelled"
"""The revision of instances without a label."""
DEFAULT_PREFILL_TOKENS_PER_S = 8000.0
"""Prefill rate that is assumed for an instance of which nothing else is known."""
MANY_REQUESTS = 10**6
"""No limit: what is held is bounded before by what replicas have room for in memory."""


class InstanceState(StrEnum):
    """Life cycle of an instance as the fleet sees it. Only ``READY`` instances receive new requests."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"
    STANDBY = "standby"


class Role(StrEnum):
    """The role of an instance; with prefill/decode disaggregation only prefill instances are scheduled."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """The description of one vLLM or vLLM-Ascend server. Figures are per instance."""

    instance_id: str
    url: str
    role: Role = Role.MIXED
    state: InstanceState = InstanceState.STARTING
    _: KW_ONLY
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    """Prior of the learned prefill rate."""
    kv_capacity_tokens: int = 1_000_000
    """KV cache size in tokens; bounds the metadata kept for the instance."""
    dispatch_window_tokens: int = 4096
    """Room for requests dispatched and not yet prefilled: two engine batches (vLLM's ``max_num_batched_tokens``), so
    that the engine never idles and the rest can still move and be reordered."""
    max_running_requests: int = 256
    """Requests dispatched and unfinished at most (vLLM's ``max_num_seqs``)."""
    max_queued_requests: int = MANY_REQUESTS
    """Most requests that may be held; one more is refused."""
    block_tokens: int = 0
    """Tokens in one block of its KV cache, as it reports; 0 until it did."""
    data_parallel_rank: int | None = None
    """The rank of a data-parallel server that this instance is, counted across all of its nodes; None: the server."""
    adapter_slots: int = 0
    """Adapters that its engine has on the device at a time, and of which it computes requests in one step (vLLM's
    ``max_loras``); 0: not known, and then adapters are taken to cost nothing there."""
    adapter_host_slots: int = 0
    """Adapters that it keeps in host memory, those on the device among them (``max_cpu_loras``); 0: as many."""
    adapter_host_ms: int = 0
    """Time of an adapter from host memory to the device, milliseconds: the engine computes nothing meanwhile."""
    adapter_disk_ms: int = 0
    """Time that an adapter takes into host memory, milliseconds, likewise."""
    dropped_blocks: int = 0
    """Blocks at the end of a hit that its engine computes again: 1 where the draft layers of its speculative model read
    ahead, and its names of blocks do not say so."""
    models: Mapping[str, str] | None = None
    """The model names that its server lists: "" for one of its model, for an adapter the name of the model that it
    adapts. None until the list was read, and for a server that has none: it is taken to serve any name."""
    adapters: Mapping[str, str] | None = None
    """The paths of the adapters among them, by name, as far as its server says them (``root``)."""
    drain_within_s: float | None = None
    """Time after which what it has goes elsewhere while it drains, as far as it can. None: as its pool says."""
    revision: str = ""
    """Its label: engine version, model revision, flags; empty: it has none. See ``scheduling.revisions``."""
    origin: Mapping[str, str] | None = None
    """Notes of discovery from when it entered the instance. None for one that was configured or entered by an operator,
    which discovery leaves alone."""

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the pool's model that discovery read from the server's pod."""
        return tuple((self.origin or {}).get("aliases", "").split())

    @property
    def revision_name(self) -> str:
        """Its revision, also where it has no label."""
        return self.revision or UNLABELLED

    def lists(self, model: str) -> bool:
        """Whether its server lists the model name."""
        return self.models is not None and model in self.models


ADAPTER_ROOM: Final = ("adapter_slots", "adapter_host_slots", "adapter_host_ms", "adapter_disk_ms")
"""The fields of an instance's description that say what room it has for adapters."""


class Running(Protocol):
    """The requests that run on an instance, through whichever replica, as the store counts them
    (``scheduling.state.request.counts_of``). A load, what a placement chose and a grant have these counts."""

    @property
    def running_requests(self) -> int: ...

    @property
    def context_tokens(self) -> int:
        """Tokens of their contexts, with whole answers."""


@dataclass(frozen=True, kw_only=True)
class LiveCounts:
    """The counts of an instance that follow from its live requests: each of these adds its own
    (``scheduling.state.request.counts_of``). Declared here alone, for the load, the record that the store keeps, and
    the scripts that change it."""

    pending_tokens: int = documented(
        "uncached prompt tokens of held requests, and of dispatched ones before their first token", default=0
    )
    dispatched_tokens: int = documented("the dispatched part of `pending_tokens`", default=0)
    deferred_tokens: int = documented(
        "the part of `pending_tokens` that is deferred: no request on time waits for it", default=0
    )
    context_tokens: int = documented(
        "expected context tokens of its running requests (prompt and expected output), shared prefixes counted for"
        " each",
        default=0,
    )
    queued_requests: int = documented("requests that are held for it", default=0)
    running_requests: int = documented("requests that are dispatched and unfinished", default=0)
    yielding_tokens: int = documented(
        "of held requests that are not deferred and are of a band above the lowest: those of that one do not wait for"
        " them",
        default=0,
        added=True,
    )
    loading_ms: int = documented(
        "time of the loads from tiers that are booked for requests before their first token", default=0, sparse=True
    )


@value
class Counts(LiveCounts):
    """The amounts that requests add to the counts of an instance."""

    @classmethod
    def sum(cls, each: Sequence[Counts]) -> Counts:
        return cls(**{name: sum(map(attrgetter(name), each)) for name in COUNTED})


COUNTED: Final = tuple(each.name for each in fields(Counts))
"""The names of these counts."""


@value
class InstanceLoad(LiveCounts):
    """One instance's load as one store call saw it, with the hit of one request's chain."""

    instance_id: str
    state: InstanceState
    cached_blocks: int = 0
    """Blocks the KV metadata lists for the instance, those of held requests included."""
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    """Learned prefill rate."""
    kv_capacity_tokens: int = 1_000_000
    _: KW_ONLY
    passed_over_tokens: int = 0
    """Tokens of held requests that the last plan passed over; some of them may have left since."""
    dispatch_window_tokens: int = 4096
    max_running_requests: int = 256
    max_queued_requests: int = MANY_REQUESTS
    version: int = 0
    """Grows with every change of the instance's figures; plans are committed against it."""
    hit_blocks: int = 0
    """Blocks at the head of the chain in question that are listed for the instance: resident ones, and those reserved
    by requests held for it."""
    window_tokens: float = 0.0
    """Prefill work assigned recently, decayed exponentially (Preble's load in a window)."""
    stalled_s: float = 0.0
    """Time since a prefill was last seen to have finished (or since work came) while work is pending, else 0. Deferred
    requests do not count: they may wait for KV memory, with nothing to prefill meanwhile."""
    kv_used_tokens: int | None = None
    """KV memory that running requests hold by the instance's own gauge, shared prefixes once; None: not known."""
    last_prefill_ms: int = 0
    """Time at which a prefill was last seen to have finished: by a first token, or by a whole answer without one."""
    silent_s: float = 0.0
    """Time since then, or since requests began to run; 0 where none runs. It judges whether the engine hangs, so that
    nothing which is only presumed ends it."""
    hit_step_tokens: int = 0
    """The tokens of which a hit of a model with several cache groups is a multiple, as its KV events show; 0: any block
    may end one (``scheduling.prompts.cache_groups``)."""
    tiers: TierLoad = NO_LOAD
    """The loads from tiers that a request would make there: a part of ``hit_blocks``."""
    adapter: AdapterWait = AT_HAND
    """The wait of the request in question for its adapter."""

    @property
    def in_flight(self) -> int:
        """Requests that the instance has, held and running: what peers call its load or queue."""
        return self.queued_requests + self.running_requests

    @property
    def running_share(self) -> float:
        """Running requests as a share of the most that it runs at a time."""
        return self.running_requests / self.max_running_requests

    @property
    def overtaken_tokens(self) -> int:
        """The part of ``pending_tokens`` that a new request on time need not wait for."""
        return overtaken_tokens(self)

    @property
    def kv_usage(self) -> float:
        """Share of KV memory taken by running requests, 0..1 (1 when they overcommit it)."""
        return min(1.0, kv_demand(self.running_tokens, self.kv_capacity_tokens))

    @property
    def running_tokens(self) -> int:
        """KV memory of the running requests, by the instance's own gauge where it is known."""
        return self.context_tokens if self.kv_used_tokens is None else self.kv_used_tokens

    @property
    def kv_demand(self) -> float:
        return kv_demand(self.context_tokens, self.kv_capacity_tokens)


def overtaken_tokens(instance: InstanceLoad, yielding_tokens: int = 0) -> int:
    """Deferred tokens, and those that the last plan passed over, as far as they still wait.

    For a request of the lowest band the script that places it counts at least all that is held of other bands
    (``yielding_tokens``): it alone knows the band, whose level it computes (``scheduling.tenants.shares``). One of a
    tenant above its share does wait for deferred requests of tenants within theirs, which are not counted apart.
    """
    held_tokens = instance.pending_tokens - instance.dispatched_tokens - instance.deferred_tokens
    return instance.deferred_tokens + min(max(instance.passed_over_tokens, yielding_tokens), held_tokens)


class PrefillTimes(Protocol):
    """The part of an instance's record that a decode stall follows from."""

    @property
    def pending_tokens(self) -> int: ...
    @property
    def deferred_tokens(self) -> int: ...
    @property
    def last_prefill_ms(self) -> int: ...
    @property
    def work_since_ms(self) -> int: ...


def stalled_s(instance: PrefillTimes, now_ms: int) -> float:
    """Time for which an instance with work on time has finished no prefill; 0 where it has none."""
    if instance.pending_tokens > instance.deferred_tokens:
        return seconds_since(now_ms, instance.last_prefill_ms, instance.work_since_ms)
    return 0.0


def seconds_since(now_ms: int, last_prefill_ms: int, began_ms: int) -> float:
    """Time since a prefill was last seen to have finished, or since what waits for one began."""
    return max(0, now_ms - max(last_prefill_ms, began_ms)) / 1000


def kv_demand(context_tokens: int, kv_capacity_tokens: int) -> float:
    """Context tokens over KV memory: above 1 where running requests share prefixes, or overcommit it."""
    return context_tokens / max(1, kv_capacity_tokens)
