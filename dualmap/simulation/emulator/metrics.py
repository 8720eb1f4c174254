"""Prometheus metrics under vLLM's names and labels. Times are seconds on the machine's clock, as a client sees."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.simulation.engine.engine_types import EngineConfig, EngineStatistics
from dualmap.simulation.engine.kv_tiers import LoadCounts

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


_SOURCES = {Tier.HOST: "host", Tier.DISK: "disk", Tier.POOL: "external_unspecified"}
_TIER_TYPES = {Tier.DISK: "fs", Tier.POOL: "obj"}


_ADAPTER_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class Histogram:
    """A histogram that takes many equal observations at once."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets as Prometheus wants them, and the sum."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        return buckets, self._sum


class InstanceMetrics(Collector):
    """The metrics of one emulated engine.

    Args:
        started_s: when its process started, Unix time.
        wall_s: seconds of the clock for seconds of the engine.
        rank: of data parallelism, among ``ranks``.
        pulls: whether it pulls from other servers, and counts that.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        statistics: Callable[[], EngineStatistics],
        *,
        started_s: float,
        wall_s: Callable[[float], float] = lambda engine_s: engine_s,
        rank: int = 0,
        ranks: int = 1,
        pulls: bool = False,
    ) -> None:
        self._wall_s = wall_s
        self.time_to_first_token_s = Histogram(_TTFT_BUCKETS_S)
        self.inter_token_s = Histogram(_TOKEN_BUCKETS_S)
        self.queue_time_s = Histogram(_REQUEST_BUCKETS_S)
        self.request_latency_s = Histogram(_REQUEST_BUCKETS_S)
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self._labels = {"model_name": model, "engine": str(rank)}
        self._ranks = ranks
        self._pulls = pulls
        self._config = config
        self._started_s = started_s
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        now = self._statistics()
        yield self._gauge("num_requests_running", "Requests in the running batch.", now.running)
        yield self._gauge("num_requests_waiting", "Requests waiting to be processed.", now.waiting)
        yield self._by_reason(now)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", now.kv_usage)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.queried_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.hit_tokens)
        if self._config.kept_tiers or self._pulls:
            yield from self._tiers(now)
        yield self._counter("num_preemptions", "Preemptions.", now.preemptions)
        yield self._gauge("emulated_staged_kv", "Prefill legs whose KV waits to be pulled.", now.staged)
        yield self._counter("emulated_leaked_kv", "Staged KV that was not pulled in time.", now.expired)
        yield self._counter("prompt_tokens", "Prompt tokens of requests whose prefill is done.", self.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", now.generated_tokens)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests.", labels=(*self._labels, "finished_reason")
        )
        for reason in ("stop", "length", "abort"):
            success.add_metric((*self._labels.values(), reason), self.finished[reason])
        yield success
        yield self._histogram("time_to_first_token_seconds", "Time to first token.", self.time_to_first_token_s)
        yield self._histogram("inter_token_latency_seconds", "Time between tokens.", self.inter_token_s)
        yield self._histogram("request_queue_time_seconds", "Time in the waiting queue.", self.queue_time_s)
        yield self._histogram("e2e_request_latency_seconds", "Time of a whole request.", self.request_latency_s)
        if self._config.adapters.slots:
            yield self._adapters(now)
            loads = now.adapter_loads
            yield self._counter("emulated_adapter_loads", "Loads of adapters to the device.", loads.to_device)
            yield self._counter("emulated_adapter_disk_loads", "Those that came from disk.", loads.from_disk)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "KV cache configuration.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        blocks = str(self._config.kv_blocks * self._ranks)  # of all ranks together, at each of them
        config.add_metric((self._labels["engine"], str(self._config.block_tokens), blocks, "True"), 1.0)
        yield config
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", self._started_s
        )

    def _by_reason(self, now: EngineStatistics) -> Metric:
        labels = (*self._labels, "reason")
        waiting = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", "Waiting requests by reason.", labels=labels)
        for reason, count in (("capacity", now.waiting - now.deferred), ("deferred", now.deferred)):
            waiting.add_metric((*self._labels.values(), reason), count)
        return waiting

    def _adapters(self, now: EngineStatistics) -> Metric:
        """vLLM lists adapters with requests in flight, the same ones in both labels; before the first such request it
        has no sample. The value is a time."""
        info = GaugeMetricFamily("vllm:lora_requests_info", "Running stats on lora requests.", labels=_ADAPTER_LABELS)
        names = ",".join(now.adapters)
        if now.adapter_loads.to_device:
            info.add_metric((str(self._config.adapters.slots), names, names), self._started_s)
        return info

    def _tiers(self, now: EngineStatistics) -> Iterator[Metric]:
        """The counters of vLLM's offloading. What is read from a disk or a pool passes host memory in vLLM, and is
        counted on both legs; here it does not, and is counted as read alone."""
        loads, a_token = now.loads, self._config.transfer.bytes_per_token
        cached = self._by_label("prompt_tokens_cached_by_source", "Prompt tokens found, by place.", "source")
        tokens = Counter({"device": now.hit_tokens})
        for tier, counts in loads.items():
            tokens[_SOURCES[tier]] += counts.tokens
        tokens["p2p"] = now.pulls.tokens
        for source in ("device", "host", "p2p", "disk", "external_unspecified"):
            cached.add_metric((*self._labels.values(), source), tokens[source])
        yield cached
        host = loads.get(Tier.HOST, LoadCounts())
        below = {_TIER_TYPES[tier]: counts for tier, counts in loads.items() if tier is not Tier.HOST}
        if self._pulls:
            below["p2p"] = now.pulls
        yield self._counter("kv_offload_load_bytes", "Bytes loaded to the device.", a_token * host.tokens)
        yield self._counter("kv_offload_load_time", "Seconds of loads to the device.", self._wall_s(host.busy_s))
        sizes = HistogramMetricFamily(
            "vllm:kv_offload_load_size", "Bytes of loads to the device.", labels=tuple(self._labels)
        )
        sizes.add_metric(tuple(self._labels.values()), buckets=[("+Inf", host.loads)], sum_value=a_token * host.tokens)
        yield sizes
        read = self._by_label("kv_offload_tiering_read_bytes", "Bytes read from lower tiers.", "tier")
        read_s = self._by_label("kv_offload_tiering_read_time", "Seconds of reads from lower tiers.", "tier")
        for kind, counts in below.items():
            read.add_metric((*self._labels.values(), kind), a_token * counts.tokens)
            read_s.add_metric((*self._labels.values(), kind), self._wall_s(counts.busy_s))
        yield from (read, read_s)

    def _by_label(self, name: str, text: str, label: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"vllm:{name}", text, labels=(*self._labels, label))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=tuple(self._labels))
        buckets, total = histogram.cumulative()
        family.add_metric(tuple(self._labels.values()), buckets=buckets, sum_value=total)
        return family


class _Page(Collector):
    def __init__(self, engines: Sequence[InstanceMetrics]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for metric in engine.collect():
                family = families.setdefault(metric.name, metric)
                if family is not metric and metric.name.startswith("vllm"):
                    family.samples += metric.samples
        yield from families.values()


def render(engines: Sequence[InstanceMetrics]) -> bytes:
    """The page of a server under ``/metrics``, in Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Page(engines))
    return generate_latest(registry)
