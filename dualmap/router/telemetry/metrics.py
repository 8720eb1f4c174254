"""A replica's counts, for Prometheus. Every instrument is bound once: a request pays for additions alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry

from dualmap.router.telemetry.instruments import Counter, Histogram, Instruments
from dualmap.router.telemetry.tenant_metrics import TenantMetrics
from dualmap.runtime.certificates import CertificateReport
from dualmap.scheduling.placing.decision import Reason
from dualmap.scheduling.request.outcome import FAILED_BY_THE_FLEET, FailureKind, Outcome
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.registered_adapters import Step
from dualmap.scheduling.state.tier_load import TierLoad
from dualmap.statestore.errors import StoreError

T = TypeVar("T")

WAIT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0)
_ANSWER_BOUNDS_S = (
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    3.0,
    5.0,
    7.5,
    10.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
    3600.0,
)
TPOT_BOUNDS_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
_CALL_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_ERROR_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
_ERROR_BOUNDS_TOKENS = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 65_536)
_ERROR_RATIO_BOUNDS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)

STORE_CALLS = (
    "place", "register", "observe", "commit", "release", "records", "membership", "heartbeat", "requests_of", "adopt",
    "snapshot", "overview", "admit",
)  # fmt: skip

TURN_PARTS = ("waiting", "prefill", "decode")
"""Where the time of a turn went: waiting for memory, to its first token, and from then to its end."""
NOT_ON_TIME = ("late", "refused", "failed")
"""Why requests were not on time: ``late`` if the deadline passed without a first token."""
COMPUTED: Final = "computed"
"""Tokens that a tier had, and that cost less to compute than to load."""
PEER: Final = "peer"
"""The tier of tokens that are pulled."""

_WHY_NOT_ON_TIME: Final[Mapping[Outcome | None, str]] = {
    Outcome.REFUSED: "refused", **dict.fromkeys(FAILED_BY_THE_FLEET, "failed")
}  # fmt: skip

MOST_TENANTS = 100
"""Tenants with series of their own."""

MOST_OF_INSTANCES = 4096
"""Series by instance of one metric, also of instances that left: a pod that comes has a name of its own."""

TOKENIZED = ("exact", "unverified", "rendered", "head", "bytes", "late", "busy")
"""Outcomes of tokenizing a prompt: ``bytes`` if its tokens cannot be computed."""

UNRENDERED = ("other_media", "small", "off", "late", "busy", "refused", "mistrusted")
"""Reasons why media are estimated, in a pool with a tokenizer."""


SHADOW_RESULTS = ("sent", "failed", "dropped")
"""What became of copies: ``dropped`` where no instance was idle."""


class StoreCall:
    """Latency and errors of one kind of store call."""

    __slots__ = ("errors", "latency_s")

    def __init__(self, latency_s: Histogram, errors: Counter) -> None:
        self.latency_s = latency_s
        self.errors = errors


async def measured(call: StoreCall, answer: Awaitable[T]) -> T:
    """Await a store call, its latency and failure counted."""
    started_s = time.perf_counter()
    try:
        return await answer
    except StoreError:
        call.errors.inc()
        raise
    finally:
        call.latency_s.observe(time.perf_counter() - started_s)


class TurnMetrics:
    """The instruments of the turns of agents' runs, of one priority class of a pool."""

    def __init__(self, metrics: RouterMetrics, pool: str, class_name: str) -> None:
        self.parked_s = metrics.parked_s.labels(pool, class_name)
        self.parked = metrics.parked.labels(pool, class_name)
        self._parts = {part: metrics.turn_s.labels(pool, class_name, part) for part in TURN_PARTS}

    def count_end(self, *seconds: float) -> None:
        """Count where the time of a turn went, by its parts."""
        for part, spent_s in zip(TURN_PARTS, seconds, strict=True):
            self._parts[part].value += spent_s


class PoolMetrics:
    """The instruments of one pool."""

    def __init__(self, metrics: RouterMetrics, pool: str) -> None:
        self.outcomes = {outcome: metrics.requests.labels(pool, outcome.value) for outcome in Outcome}
        self.reasons = {reason: metrics.decisions.labels(pool, reason.value) for reason in Reason}
        self._pool, self._faults, self._ejections = pool, metrics.faults, metrics.ejections
        self._metrics = metrics
        self._turns: dict[str, TurnMetrics] = {}
        self.retries = {kind: metrics.retries.labels(pool, kind.value) for kind in FailureKind}
        self.continuations = {kind: metrics.continuations.labels(pool, kind.value) for kind in FailureKind}
        self.cut_streams = metrics.cut_streams.labels(pool)
        self.continuation_gap_s = metrics.continuation_gap_s.labels(pool)
        self.adapter_steps = {
            (step, done): metrics.adapter_steps.labels(pool, step.value, "done" if done else "failed")
            for step in Step
            for done in (True, False)
        }
        self.adapter_load_s = metrics.adapter_load_s.labels(pool)
        self.split = metrics.legs.labels(pool, Leg.PREFILL.value)
        self.whole = metrics.legs.labels(pool, Leg.WHOLE.value)
        self.transfer_s = metrics.transfer_s.labels(pool)
        self.unstaged = metrics.unstaged.labels(pool)
        self.decode_retries = metrics.decode_retries.labels(pool)
        self.freed = metrics.freed.labels(pool)
        self.ttft_s = metrics.ttft_s.labels(pool)
        self.estimate_error_s = metrics.estimate_error_s.labels(pool)
        self.estimate_error_ratio = metrics.estimate_error_ratio.labels(pool)
        self.answer_s = metrics.answer_s.labels(pool)
        self.tpot_s = metrics.tpot_s.labels(pool)
        self.output_tokens = metrics.output_tokens.labels(pool)
        self.hold_s = metrics.hold_s.labels(pool)
        self.decision_s = metrics.decision_s.labels(pool)
        self.slo_met = metrics.slo.labels(pool, "met")
        self.slo_missed = metrics.slo.labels(pool, "missed")
        self.not_on_time = {why: metrics.not_on_time.labels(pool, why) for why in NOT_ON_TIME}
        self.arrived = metrics.arrived.labels(pool)
        self.overdue = metrics.overdue.labels(pool)
        self.limited = metrics.limited.labels(pool)
        self.fallbacks = metrics.fallbacks.labels(pool)
        self.shadows = {result: metrics.shadows.labels(pool, result) for result in SHADOW_RESULTS}
        self.prompt_tokens_expected = metrics.prompt_tokens.labels(pool, "expected")
        self.prompt_tokens_reported = metrics.prompt_tokens.labels(pool, "reported")
        self.prompt_tokens_unreported = metrics.prompt_tokens.labels(pool, "unreported")
        self.hit_tokens_expected = metrics.hit_tokens.labels(pool, "expected")
        self.hit_tokens_reported = metrics.hit_tokens.labels(pool, "reported")
        self.hit_tokens_unreported = metrics.hit_tokens.labels(pool, "unreported")
        self._tier_tokens = metrics.tier_tokens
        self.tier_hits: defaultdict[str, int] = defaultdict(int)
        """Tokens that were to be loaded from each tier or pulled, and those that were computed though one had them."""
        self.stale = metrics.stale.labels(pool)
        self.one_trip = metrics.placements.labels(pool, "1")
        self.more_trips = metrics.placements.labels(pool, "more")
        self.replaced = metrics.replaced.labels(pool)
        self.in_flight = metrics.in_flight.labels(pool)
        self.cached_error_tokens = metrics.cached_error_tokens.labels(pool)
        self._cached_is_reported = False
        self.tokenized = {how: metrics.tokenized.labels(pool, how) for how in TOKENIZED}
        self.unrendered = {why: metrics.unrendered.labels(pool, why) for why in UNRENDERED}
        self.miscounted = metrics.miscounted.labels(pool)
        self.tokens_mistrusted = metrics.tokens_mistrusted.labels(pool)

    def turns_of(self, class_name: str) -> TurnMetrics:
        """The instruments of turns of a priority class; of those of all where ``class_name`` is empty."""
        found = self._turns.get(class_name)
        if found is None:
            found = self._turns[class_name] = TurnMetrics(self._metrics, self._pool, class_name)
        return found

    def count_fault(self, instance_id: str, reason: str) -> None:
        self._faults.labels(self._pool, instance_id, reason).inc()

    def count_ejection(self, instance_id: str, rule: str) -> None:
        self._ejections.labels(self._pool, instance_id, rule).inc()

    def count_on_time(self, on_time: bool, outcome: Outcome | None) -> None:
        """Count that a request was on time, or not; ``outcome`` is how it ended, if that made it so."""
        if on_time:
            self.slo_met.value += 1
            return
        self.slo_missed.value += 1
        self.not_on_time[_WHY_NOT_ON_TIME.get(outcome, "late")].value += 1

    def count_ttft(self, ttft_s: float, expected_s: float | None) -> None:
        """Count one first token; None: no TTFT was expected."""
        self.ttft_s.observe(ttft_s)
        if expected_s is not None and ttft_s > 0:
            error_s = abs(expected_s - ttft_s)
            self.estimate_error_s.observe(error_s)
            self.estimate_error_ratio.observe(error_s / ttft_s)

    def count_answer(self, answer_s: float, first_token_s: float | None, output_tokens: int | None) -> None:
        """Count a whole answer: seconds from parsed to its last byte and to its first token (None: it did not stream),
        and the tokens of it that the instance reported (None: it reported none)."""
        self.answer_s.observe(answer_s)
        if output_tokens is None:
            return
        self.output_tokens.value += output_tokens
        if first_token_s is not None and output_tokens > 1:
            self.tpot_s.observe((answer_s - first_token_s) / (output_tokens - 1))

    def count_tiers(self, loads: TierLoad, block_tokens: int) -> None:
        """Count what tiers of the instance of a request had of its prompt, and what the prices decided."""
        for tier, loaded, computed in loads.by_tier:
            self._count_tier(tier, "loaded", tier, loaded * block_tokens)
            self._count_tier(tier, COMPUTED, COMPUTED, computed * block_tokens)
        if loads.source is not None:
            self._count_tier(PEER, "pulled", PEER, loads.source.tokens)

    def _count_tier(self, tier: str, by: str, hit: str, tokens: int) -> None:
        self._tier_tokens.labels(self._pool, tier, by).inc(tokens)
        self.tier_hits[hit] += tokens

    def compare_cached(self, expected_tokens: int, reported_tokens: int | None) -> None:
        """Compare the cached tokens of one answer with usage. vLLM reports none where nothing was cached: that is 0,
        once any were reported."""
        self._cached_is_reported |= reported_tokens is not None
        if self._cached_is_reported:
            self.cached_error_tokens.observe(abs(expected_tokens - (reported_tokens or 0)))


class RouterMetrics:
    """The metrics of one replica, in a registry of its own."""

    def __init__(
        self, pools: Iterable[str], registry: CollectorRegistry | None = None, *, tenants: int = MOST_TENANTS
    ) -> None:
        """``tenants``: those that have series of their own at most."""
        self.registry = registry if registry is not None else CollectorRegistry()
        self.instruments = instruments = Instruments()
        self._define_requests(instruments)
        self._define_store(instruments)
        self.tenants = TenantMetrics(instruments, tenants)
        self.pools = {pool: PoolMetrics(self, pool) for pool in pools}
        self.store_calls = {
            call: StoreCall(self._store_latency_s.labels(call), self._store_errors.labels(call)) for call in STORE_CALLS
        }
        self.registry.register(instruments)

    def _define_requests(self, make: Instruments) -> None:
        self.requests = make.counter("dualmap_requests", "Requests by how they ended", "pool", "outcome")
        self.refusals = make.counter("dualmap_refusals", "Requests answered with an error of the router", "code")
        self.decisions = make.counter("dualmap_decisions", "Placements by the policy's reason", "pool", "reason")
        self.retries = make.counter("dualmap_retries", "Tries on another instance", "pool", "failure")
        self.continuations = make.counter(
            "dualmap_continuations", "Streams that were to go on elsewhere, by why", "pool", "failure"
        )
        self.cut_streams = make.counter(
            "dualmap_cut_streams", "Streams that an instance failed, and that did not go on", "pool"
        )
        self.continuation_gap_s = make.histogram(
            "dualmap_continuation_gap_seconds",
            "Failure of an instance until the first token of the next one, streams that went on elsewhere",
            "pool", bounds=WAIT_BOUNDS_S,
        )  # fmt: skip
        self.adapter_steps = make.counter(
            "dualmap_adapter_steps", "Calls of this replica to instances about registered adapters, by what they did",
            "pool", "step", "result",
        )  # fmt: skip
        self.adapter_load_s = make.histogram(
            "dualmap_adapter_load_seconds",
            "Loads of registered adapters, as instances took for them",
            "pool", bounds=WAIT_BOUNDS_S,
        )  # fmt: skip
        self.batch_lines = make.counter(
            "dualmap_batch_lines", "Lines of batches by what came of them on this replica", "result"
        )
        self.late_batches = make.gauge(
            "dualmap_late_batches", "Batches that will not be done within their windows at their present rate, by why",
            "reason",
        )  # fmt: skip
        self.batch_lines_running = make.gauge(
            "dualmap_running_batch_lines", "Lines of batches that run on this replica"
        )
        self.faults = make.counter(
            "dualmap_instance_faults", "Faults of instances, by what they did",
            "pool", "instance", "reason", most=MOST_OF_INSTANCES,
        )  # fmt: skip
        self.ejections = make.counter(
            "dualmap_ejections",
            "Ejections: a replica sends the instance no more requests for a while",
            "pool", "instance", "rule", most=MOST_OF_INSTANCES,
        )  # fmt: skip
        self.legs = make.counter(
            "dualmap_legs", "Placements by leg: whole, or prefill of a split request", "pool", "leg"
        )
        self.transfer_s = make.histogram(
            "dualmap_transfer_seconds",
            "Decode leg sent to its first token, streamed answers: transfer, wait and a step",
            "pool", bounds=WAIT_BOUNDS_S,
        )  # fmt: skip
        self.unstaged = make.counter(
            "dualmap_unstaged_prefills", "Prefill legs whose answer named no KV to transfer", "pool"
        )
        self.decode_retries = make.counter(
            "dualmap_decode_retries", "Decode legs tried again with the same staged KV", "pool"
        )
        self.freed = make.counter(
            "dualmap_freed_transfers", "Staged KV that was taken over without a client, which had left", "pool"
        )
        self.arrived = make.counter("dualmap_arrived_requests", "Requests that arrived for a pool", "pool")
        self.shadows = make.counter(
            "dualmap_shadow_requests",
            "Requests that were to be copied to a revision that answers nobody",
            "pool",
            "result",
        )
        self.fallbacks = make.counter(
            "dualmap_fallback_requests", "Requests for a pool without a ready instance that its fallback served", "pool"
        )
        self.limited = make.counter(
            "dualmap_limited_requests", "Requests that a limit of their tenant kept out of a pool", "pool"
        )
        self.slo = make.counter(
            "dualmap_slo",
            "Requests whose first token came within the TTFT SLO (met) or not (missed), counted as deadlines pass",
            "pool", "slo",
        )  # fmt: skip
        self.not_on_time = make.counter(
            "dualmap_not_on_time_requests", "Requests that missed the TTFT SLO: late, refused or failed", "pool", "why"
        )
        self.overdue = make.gauge(
            "dualmap_overdue_requests", "Live requests whose TTFT deadline has passed without a first token", "pool"
        )
        self.prompt_tokens = make.counter(
            "dualmap_prompt_tokens",
            "Prompt tokens: expected by the router, reported by instances, or expected and unreported",
            "pool", "by",
        )  # fmt: skip
        self.hit_tokens = make.counter(
            "dualmap_hit_tokens",
            "Prompt tokens found cached: expected, reported by instances, or expected and unreported",
            "pool", "by",
        )  # fmt: skip
        self.tier_tokens = make.counter(
            "dualmap_tier_tokens",
            "Prompt tokens in tiers of the chosen instance: loaded, computed as that cost less, or pulled from a peer",
            "pool", "tier", "by",
        )  # fmt: skip
        self.cached_error_tokens = make.histogram(
            "dualmap_cached_tokens_error_tokens",
            "|expected - reported| cached tokens of answered requests whose instances report them",
            "pool", bounds=_ERROR_BOUNDS_TOKENS,
        )  # fmt: skip
        self.tokenized = make.counter(
            "dualmap_tokenized_prompts",
            "Prompts given to the tokenizer: exact, not yet compared with an engine's counts (unverified), with images"
            " by an instance (rendered), exact up to media (head), or cut by bytes (bytes: no tokens that can be"
            " trusted; late; busy)",
            "pool", "result",
        )  # fmt: skip
        self.unrendered = make.counter(
            "dualmap_unrendered_prompts",
            "Prompts whose images, or other media, are estimated in a pool with a tokenizer, by reason",
            "pool", "reason",
        )  # fmt: skip
        self.miscounted = make.counter(
            "dualmap_miscounted_prompts", "Tokenized prompts of which the instance counted other tokens", "pool"
        )
        self.tokens_mistrusted = make.gauge(
            "dualmap_tokens_mistrusted",
            "1 while the tokenizer is known to count otherwise than the instances, at least some kinds of requests",
            "pool", largest=True,
        )  # fmt: skip
        self.placements = make.counter(
            "dualmap_placements", "Requests placed, by round trips to the store that it took", "pool", "round_trips"
        )
        self.stale = make.counter("dualmap_stale_reservations", "Decisions made again on fresher loads", "pool")
        self.replaced = make.counter("dualmap_replaced_requests", "Held requests that the store had lost", "pool")
        self.ttft_s = make.histogram(
            "dualmap_ttft_seconds", "Request parsed to first token, streamed answers", "pool", bounds=WAIT_BOUNDS_S
        )
        self.answer_s = make.histogram(
            "dualmap_request_seconds", "Request parsed to last byte, whole answers", "pool", bounds=_ANSWER_BOUNDS_S
        )
        self.tpot_s = make.histogram(
            "dualmap_time_per_output_token_seconds",
            "First token to last byte of a streamed answer, over its reported tokens but the first",
            "pool", bounds=TPOT_BOUNDS_S,
        )  # fmt: skip
        self.output_tokens = make.counter(
            "dualmap_output_tokens", "Tokens of whole answers, as instances reported them", "pool"
        )
        self.estimate_error_s = make.histogram(
            "dualmap_ttft_estimate_error_seconds",
            "|expected - measured| TTFT of streamed requests that were placed once",
            "pool", bounds=_ERROR_BOUNDS_S,
        )  # fmt: skip
        self.estimate_error_ratio = make.histogram(
            "dualmap_ttft_estimate_error_ratio",
            "The same, over the measured TTFT",
            "pool", bounds=_ERROR_RATIO_BOUNDS,
        )  # fmt: skip
        self.hold_s = make.histogram("dualmap_hold_seconds", "Time held before dispatch", "pool", bounds=WAIT_BOUNDS_S)
        self.decision_s = make.histogram(
            "dualmap_decision_seconds", "Request parsed to reservation made", "pool", bounds=_CALL_BOUNDS_S
        )
        self.parked_s = make.histogram(
            "dualmap_parked_seconds", "Time that a turn of an agent's run waited for memory", "pool", "class",
            bounds=WAIT_BOUNDS_S,
        )  # fmt: skip
        self.parked = make.gauge("dualmap_parked_turns", "Turns of agents' runs that wait for memory", "pool", "class")
        self.turn_s = make.counter(
            "dualmap_turn_seconds", "Time of turns that are over, where runs wait for memory, by where it went",
            "pool", "class", "part",
        )  # fmt: skip
        self.connections = make.gauge("dualmap_client_connections", "Open client connections").labels()
        self.relayed_chunks = make.counter(
            "dualmap_relayed_chunks",
            "Chunks of streams that passed the native relay, counted when it gives a stream back",
        ).labels()
        self.in_flight = make.gauge("dualmap_inflight_requests", "Requests held or in flight on this replica", "pool")

    def _define_store(self, make: Instruments) -> None:
        self._store_latency_s = make.histogram(
            "dualmap_store_call_seconds", "Store calls", "call", bounds=_CALL_BOUNDS_S
        )
        self._store_errors = make.counter("dualmap_store_errors", "Failed store calls", "call")
        self._certificate_expires = make.gauge(
            "dualmap_tls_certificate_expires_unix_seconds", "End of the validity of a certificate that is in use",
            "certificate", largest=True,
        )  # fmt: skip
        self._certificate_problem = make.gauge(
            "dualmap_tls_certificate_problem",
            "1 while a renewed certificate cannot be used, or the one that is in use is not valid: /health says why",
            "certificate", largest=True,
        )  # fmt: skip
        self.outbox = make.gauge("dualmap_outbox_transitions", "Transitions waiting for the store").labels()
        self.outbox_dropped = make.counter(
            "dualmap_outbox_dropped_transitions", "Transitions dropped because the outbox was full"
        ).labels()
        self.degraded = make.gauge(
            "dualmap_store_degraded", "1 while the store is out of reach and the replica decides alone", largest=True
        ).labels()
        self.reconciled = make.counter(
            "dualmap_reconciled_requests", "Leftovers of this replica that were released late"
        ).labels()

    def certificate(self, report: CertificateReport) -> None:
        if report.expires_unix_s is not None:
            self._certificate_expires.labels(report.name).set(report.expires_unix_s)
        self._certificate_problem.labels(report.name).set(bool(report.problem))

    # what the data plane reports --------------------------------------------------------------------------------
    def connections_changed(self, change: int) -> None:
        self.connections.inc(change)

    def relayed(self, chunks: int) -> None:
        self.relayed_chunks.inc(chunks)

    def refused(self, status: int, code: str) -> None:
        """An error of the router was answered, whether before or after its request was placed."""
        self.refusals.labels(code).inc()
