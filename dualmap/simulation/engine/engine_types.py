"""Input and output of the engine model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from dualmap.scheduling.estimates.kv_tiers import InstanceTier, InstanceTiers, LoadPrice, PullEnd, Tier
from dualmap.scheduling.prompts.cache_groups import CacheGroup
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.simulation.engine.adapter_slots import AdapterCounts, AdapterMemory
from dualmap.simulation.engine.kv_tiers import KvTier, LoadCounts
from dualmap.simulation.engine.kv_transfer import KvTransfer
from dualmap.simulation.engine.step_time import StepCosts


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One vLLM V1 instance: its scheduler's limits, its KV memory and what a step costs."""

    costs: StepCosts
    kv_capacity_tokens: int = 1_000_000
    """KV memory in tokens, shared by running requests and the prefix cache."""
    _: KW_ONLY
    tiers: tuple[KvTier, ...] = ()
    """Memory behind it, the nearest first, see ``simulation.engine.kv_tiers``. One of no size is not there."""
    ignores_load_limits: bool = False
    """Whether it loads all that its tiers have, whatever a request allows, as vLLM before 0.32 does."""
    block_tokens: int = 128
    cache_groups: tuple[CacheGroup, ...] = ()
    """Cache groups of the model beside one of full attention (``scheduling.prompts.cache_groups``)."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step, prefill and decode together."""
    max_num_seqs: int = 256
    """Most running requests."""
    max_model_len: int = 131_072
    """Prompt and output tokens of one request at most."""
    by_priority: bool = False
    """Requests of a lower ``priority`` go first, as with vLLM's ``--scheduling-policy priority``. Otherwise priorities
    change nothing."""
    prefill_first: bool = False
    """Running decodes wait while prompts can be prefilled, as in vLLM without chunked prefill. Otherwise every step
    does both."""
    transfer: KvTransfer = field(default_factory=KvTransfer)
    """Moves of KV to and from it. The engine itself moves nothing: see ``Engine.receive``."""
    adapters: AdapterMemory = field(default_factory=AdapterMemory)
    staged_timeout_s: float = 480.0
    """Staged KV that is not pulled is freed after this time (vLLM's ``VLLM_NIXL_ABORT_REQUEST_TIMEOUT``)."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.kv_blocks < 1:
            raise ValueError("the KV pool must hold at least one block of at least one token")
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, and that at least 1")
        if self.cache_groups and self.kept_tiers:
            raise ValueError("an engine with cache groups has no tiers")
        if not self.staged_timeout_s > 0:
            raise ValueError("staged_timeout_s must be above 0")

    @property
    def kv_blocks(self) -> int:
        return self.kv_capacity_tokens // self.block_tokens

    @property
    def kept_tiers(self) -> tuple[KvTier, ...]:
        """The tiers that are there."""
        return tuple(each for each in self.tiers if each.tokens)

    def instance_tiers(self, pulls_at: str | None = None) -> InstanceTiers:
        """The description of its tiers, by the engine's own figures, and of its part in pulls, if it has a host for
        that."""
        a_token = self.transfer.bytes_per_token
        return InstanceTiers(
            tuple(InstanceTier(each.tier, each.tokens, each.price(a_token)) for each in self.kept_tiers),
            takes_limits=not self.ignores_load_limits,
            pulls=None if pulls_at is None else self._pull_end(pulls_at),
        )

    def _pull_end(self, host: str) -> PullEnd:
        transfer = self.transfer
        layout = f"{self.block_tokens} tokens of {transfer.bytes_per_token} bytes"
        return PullEnd(host, 0, layout, LoadPrice(transfer.latency_s, 1 / transfer.tokens_per_s))

    def with_tier(self, tier: Tier, **figures: Any) -> EngineConfig:
        """The configuration with these figures of a tier in place of its own. Raises ValueError."""
        if not any(each.tier is tier for each in self.tiers):
            raise ValueError(f"this engine has no tier {tier}")
        changed = (replace(each, **figures) if each.tier is tier else each for each in self.tiers)
        return replace(self, tiers=tuple(changed))

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of one request at most: what the model and what the memory allow."""
        return min(self.max_model_len, self.kv_blocks * self.block_tokens)

    def prefill_tokens_per_s(self, prompt_tokens: int = 8192) -> float:
        """Prefill rate of one prompt of this length, alone on the instance."""
        return prompt_tokens / self.costs.prefill_s(prompt_tokens, self.max_num_batched_tokens)

    def instance_spec(self, instance_id: str) -> InstanceSpec:
        """A made-up instance of this kind, described by the engine's own figures."""
        room = self.adapters
        return InstanceSpec(
            instance_id,
            f"http://{instance_id}",
            prefill_tokens_per_s=self.prefill_tokens_per_s(),
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running_requests=self.max_num_seqs,
            adapter_slots=room.slots,
            adapter_host_slots=room.host_slots,
            adapter_host_ms=round(room.host_s * 1000) if room.slots else 0,
            adapter_disk_ms=round(room.disk_s * 1000) if room.slots else 0,
        )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine sees it: lengths and block hashes, no text."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """Tokens it will generate; the model knows them in advance, a real engine does not."""
    block_hashes: tuple[int, ...] = ()
    """Prefix hashes of the prompt's full blocks of ``block_tokens``: hash k covers blocks ``0..k``. May be
    shorter than the prompt; what it leaves out is never shared."""
    _: KW_ONLY
    stages_kv: bool = False
    """A prefill leg: it ends with its first token, and its KV stays until it is pulled (``Engine.release_staged``) or
    times out."""
    awaits_kv: bool = False
    """A decode leg: the KV of its prompt comes by a transfer (``Engine.receive``), as far as it is not cached here."""
    max_load_tokens: int | None = None
    """Tokens of its prompt that are loaded from tiers, or pulled, at most, in whole blocks; None: all that there are.
    """
    pulls: bool = False
    """What neither the device nor a tier has of its prompt may come from another engine's cache: the mover of the KV
    says how much of it (``Engine.receive``)."""
    adapter: str = ""
    """The adapter that computes it; empty: none."""
    adapter_share: float = 1.0
    """Time of a load of that, as a multiple of the engine's."""
    priority: int = 0
    """The lower the sooner, where the engine schedules by priority."""


class RequestRefusedError(ValueError):
    """The engine can never serve this request (too long, empty, or its id is taken)."""


class EventKind(StrEnum):
    SCHEDULED = "scheduled"
    """The request left the waiting queue; ``tokens`` of its prompt were found in the prefix cache, loaded from a tier,
    or came by a transfer."""
    FIRST_TOKEN = "first_token"
    """Prefill done, first token out; ``tokens`` of its prompt had been cached when it was first scheduled."""
    FINISHED = "finished"
    """``tokens`` were generated; its blocks are free."""
    PREEMPTED = "preempted"
    """Lost its blocks, waits at the head of the queue to be recomputed; ``tokens`` were generated so far."""
    PULLING = "pulling"
    """A decode leg, or a request that pulls, has its blocks; KV of ``tokens`` of its prompt is to be moved here."""
    STAGED = "staged"
    """A prefill leg has ended, and its KV of ``tokens`` waits to be pulled. Follows its FINISHED."""
    EXPIRED = "expired"
    """Staged KV of ``tokens`` was freed because it was not pulled in time."""


class Event(NamedTuple):
    """Something that happened in an engine at one moment of its time."""

    kind: EventKind
    time_s: float
    request_id: str = ""
    tokens: int = 0


@dataclass(kw_only=True, frozen=True, slots=True)
class EngineStatistics:
    """The engine at one moment, and what it counted since its start."""

    waiting: int
    running: int
    used_blocks: int
    """Blocks that running requests hold."""
    cached_blocks: int
    """Blocks in the prefix cache, those that running requests hold included."""
    total_blocks: int
    context_tokens: int
    """Tokens in KV memory of the running requests."""
    steps: int
    prefill_tokens: int
    """Prompt tokens computed, recomputation after preemption included."""
    generated_tokens: int
    queried_tokens: int
    """Prompt tokens looked up in the prefix cache (once per scheduling, as vLLM counts)."""
    hit_tokens: int
    """Those found on the device."""
    preemptions: int
    pulling: int = 0
    """Requests that have their blocks and wait for KV of another engine; ``waiting`` counts them too, as vLLM does."""
    staged: int = 0
    """Prefill legs whose KV waits to be pulled; ``used_blocks`` counts it."""
    loading: int = 0
    """Requests that have their blocks and wait for a load; ``waiting`` counts them too."""
    loads: Mapping[Tier, LoadCounts] = field(default_factory=dict)
    """Counters of the links to the tiers that are there."""
    pulls: LoadCounts = field(default_factory=LoadCounts)
    """Counters of pulls from other engines' caches."""
    deferred: int = 0
    """Waiting requests that are passed over until something comes: a slot for their adapter, or KV."""
    adapter_loads: AdapterCounts = field(default_factory=AdapterCounts)
    adapters: tuple[str, ...] = ()
    """Adapters of running requests."""
    expired: int = 0
    """Number of staged KVs that were not pulled in time: a client or router leaked them."""

    @property
    def kv_usage(self) -> float:
        """Share of KV memory that running requests hold, 0..1."""
        return self.used_blocks / self.total_blocks
