"""The ``/metrics`` page of a vLLM server: KV capacity, tokens processed, loads from tiers, start of the process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from dualmap.runtime.pool_settings import MAX_BLOCK_TOKENS, MAX_KV_CAPACITY_TOKENS
from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.estimates.load_prices import LoadReading

_ADAPTERS = "vllm:lora_requests_info"
_LOADED, _ON_DEVICE = "vllm:lora_adapter_loaded", "vllm:num_gpu_loaded_lora_adapters"
_SLOTS = "vllm:max_gpu_lora_adapters"
"""Metrics of versions after 0.33, proposed for vLLM: a sample for each adapter that is loaded, and how many are on the
device, which is there before any is."""
_TOKEN_COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_REQUEST_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_START_TIME = "process_start_time_seconds"
_CACHE_CONFIG = "vllm:cache_config_info"
_READ = (*_TOKEN_COUNTERS, *_REQUEST_GAUGES, _START_TIME, _CACHE_CONFIG)
_CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_LOAD_TIME, _LOADS = "vllm:kv_offload_load_time_total", "vllm:kv_offload_load_size_count"
_READ_TIME = "vllm:kv_offload_tiering_read_time_total"
_OFFLOADING = "vllm:kv_offload_"
_LOADING = (_CACHED_BY_SOURCE, _LOAD_TIME, _LOADS, _READ_TIME)
_SOURCES = {"host": Tier.HOST, "disk": Tier.DISK, "external_unspecified": Tier.POOL}
"""Tiers by the source that tokens of prompts are counted under."""
_TIER_TYPES = {"fs": Tier.DISK, "obj": Tier.POOL}
"""Tiers by the type under which vLLM counts reads from below host memory; the tier's number may stand before it."""
_PULLED = "p2p"
"""What pulls are counted under, as a source and as a type of tier."""
_MAX_LINE_CHARS = 8192
"""Lines of ``cache_config_info`` have about a thousand characters."""
_MAX_CHARS = 1 << 20
"""Characters of lines that are parsed: a server has five lines for each of its engines."""
_SAMPLE: Final = re.compile(
    r'([a-zA-Z_:][\w:]*+)(?:[ \t]*+\{((?:[^"}]++|"(?:[^"\\]++|\\.)*+")*+)\}[ \t]*+|[ \t]++)'
    r"(\S++)(?:[ \t]++-?\d++)?[ \t]*+",
    re.ASCII,
)
"""A line of Prometheus' text format: name, labels, value. No part of it is looked at twice, so that a line takes linear
time whatever is in it; that of ``prometheus_client``'s parser is quadratic."""
_LABEL: Final = re.compile(r'[ \t,]*+([a-zA-Z_]\w*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+', re.ASCII)
_ESCAPED: Final = re.compile(r"\\(.)")
_UNESCAPED: Final = {"n": "\n", '"': '"', "\\": "\\"}


class Sample(NamedTuple):
    """One line of a metrics page."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class ServerRun:
    """One run of a server's process, as far as its metrics identify it; a field is None if it is not reported."""

    started_s: float | None = None
    """Start of the process, Unix time on the server's clock."""
    tokens: float | None = None
    """Prompt and generated tokens since the start, summed over all engines."""
    requests: float | None = None
    """Requests that its engines run or queue, when it was read."""

    def is_restart_of(self, former: ServerRun) -> bool:
        """Whether the process was restarted between two readings.

        Start times decide if both readings have one: only a later one is a restart, so that several processes behind
        one URL are not taken for a process that keeps restarting. Otherwise, counters that went back show a restart.
        """
        if former.started_s is not None and self.started_s is not None:
            return self.started_s > former.started_s
        return former.tokens is not None and self.tokens is not None and self.tokens < former.tokens

    def is_same_as(self, former: ServerRun) -> bool:
        """Whether start times show that the process was not restarted. Counters cannot: they may have grown again."""
        return self.started_s is not None and former.started_s is not None and not self.is_restart_of(former)


def server_run_of(metrics: str, rank: int | None = None) -> ServerRun:
    """The run that a metrics page belongs to; with a ``rank``, by the tokens of that rank alone."""
    tokens: list[float] = []
    requests: list[float] = []
    started_s: list[float] = []
    for sample in _samples(metrics):
        if sample.name in _TOKEN_COUNTERS and math.isfinite(sample.value) and _is_of(sample, rank):
            tokens.append(sample.value)
        elif sample.name in _REQUEST_GAUGES and math.isfinite(sample.value) and _is_of(sample, rank):
            requests.append(sample.value)
        elif sample.name == _START_TIME and math.isfinite(sample.value):
            started_s.append(sample.value)
    return ServerRun(max(started_s, default=None), sum(tokens) if tokens else None, sum(requests) if requests else None)


def kv_capacity_of(metrics: str, rank: int | None = None) -> int | None:
    """KV cache size of the server, or of one rank, in tokens; None if it is not reported, or impossible.

    With data parallelism every engine has a line of its own. ``kv_cache_size_tokens`` is the engine's own and adds up.
    ``num_gpu_blocks``, all that older versions have, is already the server's sum, repeated in every line.
    """
    configs = [sample.labels for sample in _samples(metrics) if sample.name == _CACHE_CONFIG]
    own = [config for config in configs if rank is None or config.get("engine") == str(rank)]
    own_tokens = [_count(config, "kv_cache_size_tokens") for config in own]
    if any(own_tokens):
        capacity = sum(own_tokens)
    else:
        capacity = max(
            [_count(config, "block_size") * _count(config, "num_gpu_blocks") for config in configs], default=0
        )
        capacity //= 1 if rank is None else max(1, len(configs))
    return capacity if 0 < capacity <= MAX_KV_CAPACITY_TOKENS else None


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """The report of a server about its adapters."""

    slots: int | None = None
    """Adapters that it has on its device at a time; None where it serves none, or does not report it."""
    in_flight: tuple[str, ...] = ()
    """Those with requests that run or wait there."""
    resident: Residency | None = None
    """Those that it has; None where it does not report it, or several engines do."""


def adapters_of(metrics: str) -> AdapterReport:
    """The newest sample of requests alone: vLLM keeps one for each set of adapters that ever was in flight, whose value
    is the time when it was."""
    lines = [line for line in metrics.splitlines() if line.startswith(_ADAPTERS)]
    resident, slots = _residency(metrics)
    for sample in _samples(max(lines, key=_time_of, default=""), (_ADAPTERS,)):
        names = sample.labels.get("running_lora_adapters", "").split(",")
        return AdapterReport(_count(sample.labels, "max_lora") or slots, tuple(filter(None, names)), resident)
    return AdapterReport(slots, (), resident)


def _residency(metrics: str) -> tuple[Residency | None, int | None]:
    """The adapters that a server has, and its slots on the device, where its version reports them."""
    device, loaded, engines, slots = set[str](), set[str](), set[str | None](), None
    for sample in _samples(metrics, (_LOADED, _ON_DEVICE, _SLOTS)):
        if sample.name == _LOADED:
            name = sample.labels.get("adapter_name", "")
            loaded.add(name)
            if sample.labels.get("level") == "gpu":
                device.add(name)
        elif sample.name == _ON_DEVICE:
            engines.add(sample.labels.get("engine"))
        elif 0 < sample.value < MAX_KV_CAPACITY_TOKENS:
            slots = int(sample.value)
    return Residency(frozenset(device), frozenset(loaded)) if len(engines) == 1 else None, slots


def _time_of(line: str) -> float:
    try:
        return float(line.rpartition(" ")[2])
    except ValueError:
        return -math.inf


def block_tokens_of(metrics: str) -> int | None:
    """Tokens in one block of the server's KV cache, of a hybrid model in one of full attention, whose size may be
    another one than the configured; None if it is not reported, or its engines differ."""
    configs = [sample.labels for sample in _samples(metrics) if sample.name == _CACHE_CONFIG]
    sizes = {_count(config, "effective_attention_block_size") or _count(config, "block_size") for config in configs}
    size = sizes.pop() if len(sizes) == 1 else 0
    return size if 0 < size <= MAX_BLOCK_TOKENS else None


def loads_of(metrics: str, rank: int | None = None) -> dict[Tier, LoadReading]:
    """The counters of loads of each tier that the server, or one rank of it, reports tokens and times of.

    What is read from below host memory passes it in vLLM: its tokens count in the first of its two times only.
    """
    tokens: dict[Tier, float] = {}
    busy_s: dict[Tier, float] = {}
    loads = 0.0
    for sample in _samples(metrics, _LOADING):
        if not _is_of(sample, rank):
            continue
        if sample.name == _CACHED_BY_SOURCE:
            tier = _SOURCES.get(sample.labels.get("source", ""))
            if tier is not None:
                tokens[tier] = tokens.get(tier, 0.0) + sample.value
        elif sample.name == _READ_TIME:
            tier = _TIER_TYPES.get(sample.labels.get("tier", "").rpartition(":")[2])
            if tier is not None:
                busy_s[tier] = busy_s.get(tier, 0.0) + sample.value
        elif sample.name == _LOAD_TIME:
            busy_s[Tier.HOST] = busy_s.get(Tier.HOST, 0.0) + sample.value
        else:
            loads += sample.value
    return {
        tier: LoadReading(tokens[tier], busy_s[tier], loads if tier is Tier.HOST else 0.0)
        for tier in Tier
        if tier in tokens and tier in busy_s
    }


def names_offloading(metrics: str) -> bool:
    """Whether the page has metrics of vLLM's own offloading, which alone knows limits of loads. Their names are there
    before anything was loaded."""
    return _OFFLOADING in metrics


def pulls_of(metrics: str, rank: int | None = None) -> LoadReading | None:
    """The counters of pulls from other servers' caches; None where the server, or the rank of it, reports none."""
    tokens: float | None = None
    busy_s = 0.0
    for sample in _samples(metrics, (_CACHED_BY_SOURCE, _READ_TIME)):
        if not _is_of(sample, rank):
            continue
        if sample.name == _CACHED_BY_SOURCE and sample.labels.get("source") == _PULLED:
            tokens = (tokens or 0.0) + sample.value
        elif sample.name == _READ_TIME and sample.labels.get("tier", "").rpartition(":")[2] == _PULLED:
            busy_s += sample.value
    return None if tokens is None else LoadReading(tokens, busy_s)


def _is_of(sample: Sample, rank: int | None) -> bool:
    return rank is None or sample.labels.get("engine") == str(rank)


def _count(labels: dict[str, str], name: str) -> int:
    """A label as a positive number; 0 if it is not one."""
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 20 else 0


def _samples(metrics: str, read: tuple[str, ...] = _READ) -> Iterator[Sample]:
    """The samples that are used, parsed line by line: a malformed line is skipped, and histograms are not parsed."""
    left = _MAX_CHARS
    for line in metrics.splitlines():
        if line.startswith(read) and len(line) <= _MAX_LINE_CHARS:
            left -= len(line)
            if left < 0:
                return
            sample = _sample_of(line)
            if sample is not None:
                yield sample


def _sample_of(line: str) -> Sample | None:
    """The sample of a line; None where it is malformed."""
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return None
    name, text, value = found.groups(default="")
    labels, at, text = dict[str, str](), 0, text.rstrip(" \t,")
    while at < len(text):
        label = _LABEL.match(text, at)
        if label is None:
            return None
        labels[label[1]] = _ESCAPED.sub(lambda each: _UNESCAPED.get(each[1], each[0]), label[2])
        at = label.end()
    try:
        return Sample(name, labels, float(value))
    except ValueError:
        return None
