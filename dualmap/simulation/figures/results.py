"""The figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from statistics import fmean, pstdev

from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.scaling.role_plan import RoleChange
from dualmap.simulation.figures.on_time import TPOT_SLO_S, OnTimeShares
from dualmap.simulation.figures.run_times import RunTimes, run_times
from dualmap.simulation.workload.trace_figures import quantile


@dataclass(frozen=True, slots=True)
class SizeChange:
    """One decision, on the decode instances where ``role`` says so, else on all others."""

    at_s: float
    size: int
    wanted: int
    reason: str
    role: str = ""


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times in seconds of virtual time; None: it never got there."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    slo_s: float
    _: KW_ONLY
    chosen_id: str = ""
    """The instance whose queue it was put into; a migration may take it to another."""
    instance_id: str = ""
    """The instance that got it; of a split request the one that prefilled."""
    decode_id: str = ""
    """The instance of its decode leg; empty: it was not split."""
    key_blocks: int = 0
    """Length of its hash key."""
    expected_ttft_s: float = 0.0
    """TTFT that the policy expected when it chose."""
    expected_cached_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the engine found in its cache."""
    dispatched_s: float | None = None
    """When its instance got it."""
    first_token_s: float | None = None
    finish_s: float | None = None
    tries: int = 0
    """Instances that had room for it, one after the other."""
    outcome: Outcome | None = None
    """How it ended."""
    tenant: str = ""
    priority: str = ""
    prefill_work_s: float = 0.0
    """The prefill of what its instance had not cached, at the instance's rate."""
    kv_share: float = 0.0
    """The part of its instance's KV memory that its context takes."""
    run: str = ""
    """The run of an agent that it is a turn of; empty: none."""

    @property
    def ttft_s(self) -> float:
        """Time to first token since arrival, waiting in the fleet included; infinite if there was none."""
        return self.first_token_s - self.arrival_s if self.first_token_s is not None else float("inf")

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s if self.finish_s is not None else float("inf")

    @property
    def held_s(self) -> float:
        """How long it waited in the fleet; infinite if it never got to an instance."""
        return self.dispatched_s - self.arrival_s if self.dispatched_s is not None else float("inf")

    @property
    def ttft_error_s(self) -> float:
        """|expected - actual| TTFT; the expectation is the policy's at the moment of choice."""
        return abs(self.expected_ttft_s - self.ttft_s)

    @property
    def on_time(self) -> bool:
        return self.ttft_s <= self.slo_s

    def work_s(self, at_s: float) -> float:
        """Work of the tenant on instances up to this time, in seconds of one instance, see
        ``scheduling.tenants.shares``. Of a prefill under way the part counts that its time by then is of the whole."""
        if self.dispatched_s is None or self.first_token_s is None or self.dispatched_s >= at_s:
            return 0.0
        ended_s = at_s if self.finish_s is None else min(at_s, self.finish_s)
        prefills_s = max(self.first_token_s - self.dispatched_s, 1e-9)
        prefilled = min(1.0, (at_s - self.dispatched_s) / prefills_s)
        return self.prefill_work_s * prefilled + self.kv_share * (ended_s - self.dispatched_s)

    @property
    def answered(self) -> bool:
        return self.finish_s is not None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: there was none, or no answer."""
        if self.finish_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The fleet at one moment."""

    time_s: float
    pending_tokens: tuple[int, ...]
    """Pending tokens of each ready instance, in id order."""
    held_requests: int
    running_requests: int

    @property
    def cv(self) -> float:
        """Coefficient of variation of pending tokens over the instances; 0 when nothing is pending."""
        mean = fmean(self.pending_tokens) if self.pending_tokens else 0.0
        return pstdev(self.pending_tokens) / mean if mean > 0 else 0.0


MIN_PENDING_TOKENS = 2048
"""Pending tokens of an instance, in the mean over the fleet, below which balance is meaningless: less than one step of
an engine each, so that a single request makes the difference."""


def load_cv(samples: Sequence[LoadSample]) -> float | None:
    """Mean over the moments of load of the coefficient of variation of pending tokens; None if there were none."""
    loaded = [one.cv for one in samples if one.pending_tokens and fmean(one.pending_tokens) >= MIN_PENDING_TOKENS]
    return fmean(loaded) if loaded else None


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles over answered requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        ordered = sorted(values)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0)
        return cls(fmean(ordered), *(quantile(ordered, q) for q in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class TenantResult:
    """The figures of one tenant in a run."""

    requests: int
    on_time: float
    """Share of its requests."""
    refused: int
    ttft_p99_s: float
    work_s: float
    """Work of instances on its requests until the last arrival, in seconds of one instance."""
    work_share: float
    """The part of it in that of all tenants."""


@dataclass(kw_only=True, frozen=True, slots=True)
class RunResult:
    """The figures of one run, its first ``skip_requests`` requests left out."""

    policy: str
    trace: str
    instances: int
    rate_per_s: float
    requests: int
    refused: int
    effective_capacity: float
    """Share of requests whose TTFT met the SLO; refused ones did not."""
    on_time: OnTimeShares
    """Shares on time by prompt tokens and by length, and with the time per token."""
    ttft_s: Percentiles
    e2e_s: Percentiles
    tpot_s: Percentiles
    """Time per output token after the first."""
    hit_rate: float
    """Share of input tokens that engines found in their caches."""
    infinite_hit_rate: float
    """Hit rate of one cache without limit that all instances shared: the bound."""
    expected_hit_rate: float
    """Hit rate as the KV metadata had it."""
    load_cv: float | None
    """Mean of the coefficient of variation of pending tokens over ``samples``, see ``load_cv``."""
    migrations: int
    """Migrations from the first counted arrival to the last, as are preemptions and samples: no warm-up, no drain."""
    preemptions: int
    key_blocks: Mapping[int, int]
    """Requests by length of their hash key in blocks."""
    ttft_error_p50: float
    """|expected - actual| / actual TTFT; the expectation is the policy's at the moment of choice."""
    ttft_error_p90: float
    ttft_error_s: Percentiles
    """Errors of the TTFT estimates in seconds."""
    undisturbed_share: float
    """Share of the answered requests that are undisturbed: see ``undisturbed``."""
    undisturbed_error_p50: float
    """|expected - actual| / actual TTFT over the undisturbed alone: what an estimate could have known."""
    undisturbed_error_p90: float
    longest_hold_s: float
    """Longest wait in the fleet of an answered request."""
    span_s: float
    """Time from the first arrival to the last answer."""
    samples: tuple[LoadSample, ...] = ()
    timeline: tuple[tuple[float, float, float], ...] = ()
    """(time, share on time, P90 TTFT) of the requests that arrived in each interval."""
    by_instance: Mapping[str, tuple[tuple[float, int, float], ...]] = field(default_factory=dict)
    """(time, requests, hit rate) of the requests that each instance was sent in each interval."""
    instance_hours: float = 0.0
    """Hours of instances that were ready, starting, or still answering, until the last arrival."""
    changes: tuple[SizeChange, ...] = ()
    """Decisions of the autoscaler."""
    role_changes: tuple[tuple[float, RoleChange], ...] = ()
    """Role changes of the leader, each with its time."""
    split_share: float = 0.0
    """Share of the answered requests that had a decode leg of their own."""
    moved_tokens: int = 0
    """Tokens whose KV was moved between instances, in the whole run."""
    leaks: int = 0
    """Staged KV that was not pulled in time, in the whole run."""
    slo_tpot_s: float | None = None
    """SLO of the time per output token, where the run has one."""
    answers_per_s: float = 0.0
    """Answers that ended between the first arrival and the last, a second: the throughput of a closed loop."""
    by_tenant: Mapping[str, TenantResult] = field(default_factory=dict)
    """Each tenant by its name; requests without one are left out."""
    runs: RunTimes | None = None
    """Times of agents' runs; None: the trace has no sessions."""
    adapter_loads: int = 0
    """Loads of adapters to a device, from the first counted arrival to the last."""
    adapter_disk_loads: int = 0
    """The part of them that came from disk."""

    @property
    def share_on_time(self) -> float:
        """Share of requests that kept every SLO of the run: that of the first token, and that per token if there is
        one."""
        return self.effective_capacity if self.slo_tpot_s is None else self.on_time.both_slos

    @property
    def span_of_arrivals_s(self) -> float:
        """Time until the last arrival."""
        return self.requests / self.rate_per_s

    @property
    def hit_share_of_bound(self) -> float:
        return self.hit_rate / self.infinite_hit_rate if self.infinite_hit_rate > 0 else 0.0


@dataclass(kw_only=True, frozen=True, slots=True)
class RunRecord:
    """Everything that one run leaves behind."""

    policy: str
    trace: str
    instances: int
    rate_per_s: float
    outcomes: Sequence[RequestOutcome]
    samples: Sequence[LoadSample]
    infinite_cached_tokens: Sequence[int]
    migrations: int
    """Migrations between the first counted arrival and the last, like preemptions."""
    preemptions: int
    skip_requests: int
    instance_hours: float = 0.0
    changes: tuple[SizeChange, ...] = ()
    role_changes: tuple[tuple[float, RoleChange], ...] = ()
    moved_tokens: int = 0
    leaks: int = 0
    slo_tpot_s: float | None = None
    turns_of_runs: Mapping[str, int] = field(default_factory=dict)
    """Turns that each run has in the trace, however many of them arrived."""
    adapter_loads: int = 0
    """Loads of adapters to a device from the first counted arrival to the last, and the part of them from disk."""
    adapter_disk_loads: int = 0


def arrival_rate_per_s(outcomes: Sequence[RequestOutcome]) -> float:
    """Mean rate of the arrivals as they were; infinite when everything arrived at once."""
    span_s = outcomes[-1].arrival_s - outcomes[0].arrival_s if outcomes else 0.0
    return len(outcomes) / span_s if span_s > 0 else float("inf")


def summarize(record: RunRecord) -> RunResult:
    """The figures of a run; every quantile is over the requests that were answered."""
    counted = record.outcomes[record.skip_requests :]
    answered = [outcome for outcome in counted if outcome.answered]
    input_tokens = max(1, sum(outcome.input_tokens for outcome in answered))
    ideal_tokens = zip(counted, record.infinite_cached_tokens[record.skip_requests :], strict=True)
    bound_tokens = sum(tokens for outcome, tokens in ideal_tokens if outcome.answered)
    are_alone = undisturbed(record.outcomes)[record.skip_requests :]
    alone = [outcome for outcome, is_alone in zip(counted, are_alone, strict=True) if is_alone]
    errors, alone_errors = _relative_errors(answered), _relative_errors(alone)
    samples = tuple(_while_requests_arrived(record.samples, counted))
    on_time = OnTimeShares.of(counted, record.slo_tpot_s or TPOT_SLO_S)
    return RunResult(
        policy=record.policy,
        trace=record.trace,
        instances=record.instances,
        rate_per_s=record.rate_per_s,
        requests=len(counted),
        refused=len(counted) - len(answered),
        effective_capacity=on_time.by_requests,
        on_time=on_time,
        ttft_s=Percentiles.of([outcome.ttft_s for outcome in answered]),
        e2e_s=Percentiles.of([outcome.e2e_s for outcome in answered]),
        tpot_s=Percentiles.of([tpot_s for outcome in answered if (tpot_s := outcome.tpot_s) is not None]),
        hit_rate=sum(outcome.cached_tokens for outcome in answered) / input_tokens,
        infinite_hit_rate=bound_tokens / input_tokens,
        expected_hit_rate=sum(outcome.expected_cached_tokens for outcome in answered) / input_tokens,
        load_cv=load_cv(samples),
        migrations=record.migrations,
        preemptions=record.preemptions,
        key_blocks=dict(sorted(Counter(outcome.key_blocks for outcome in counted).items())),
        ttft_error_p50=errors.p50,
        ttft_error_p90=errors.p90,
        ttft_error_s=Percentiles.of([outcome.ttft_error_s for outcome in answered]),
        undisturbed_share=len(alone) / max(1, len(answered)),
        undisturbed_error_p50=alone_errors.p50,
        undisturbed_error_p90=alone_errors.p90,
        longest_hold_s=max((o.held_s for o in answered), default=0.0),
        span_s=max((o.finish_s for o in answered if o.finish_s is not None), default=0.0),
        samples=samples,
        timeline=tuple(_timeline(record.outcomes)),
        by_instance=_by_instance(record.outcomes),
        instance_hours=record.instance_hours,
        changes=record.changes,
        role_changes=record.role_changes,
        split_share=sum(bool(outcome.decode_id) for outcome in answered) / max(1, len(answered)),
        moved_tokens=record.moved_tokens,
        adapter_loads=record.adapter_loads,
        adapter_disk_loads=record.adapter_disk_loads,
        leaks=record.leaks,
        slo_tpot_s=record.slo_tpot_s,
        answers_per_s=answers_per_s(
            [outcome.arrival_s for outcome in counted],
            (outcome.finish_s for outcome in counted if outcome.finish_s is not None),
        ),
        by_tenant=_by_tenant(counted),
        runs=run_times(record.outcomes, record.turns_of_runs, counted[0].arrival_s) if counted else None,
    )


def answers_per_s(arrivals_s: Sequence[float], ends_s: Iterable[float]) -> float:
    """Answers that ended between the first arrival and the last, a second."""
    last_s = max(arrivals_s, default=0.0)
    return sum(end_s <= last_s for end_s in ends_s) / span_s(arrivals_s)


def span_s(arrivals_s: Sequence[float]) -> float:
    """Time from the first arrival to the last, never 0."""
    return max(max(arrivals_s, default=0.0) - min(arrivals_s, default=0.0), 1e-9)


def _by_tenant(counted: Sequence[RequestOutcome]) -> dict[str, TenantResult]:
    names = sorted({outcome.tenant for outcome in counted if outcome.tenant})
    if not names:
        return {}
    last_s = counted[-1].arrival_s
    all_work_s = max(1e-9, sum(outcome.work_s(last_s) for outcome in counted))
    results = {}
    for name in names:
        own = [outcome for outcome in counted if outcome.tenant == name]
        work_s = sum(outcome.work_s(last_s) for outcome in own)
        ttfts_s = sorted(outcome.ttft_s for outcome in own if outcome.answered)
        results[name] = TenantResult(
            requests=len(own),
            on_time=sum(outcome.on_time for outcome in own) / len(own),
            refused=sum(not outcome.answered for outcome in own),
            ttft_p99_s=quantile(ttfts_s, 0.99) if ttfts_s else 0.0,
            work_s=work_s,
            work_share=work_s / all_work_s,
        )
    return results


def _while_requests_arrived(samples: Sequence[LoadSample], counted: Sequence[RequestOutcome]) -> list[LoadSample]:
    return [sample for sample in samples if counted and counted[0].arrival_s <= sample.time_s <= counted[-1].arrival_s]


def undisturbed(outcomes: Sequence[RequestOutcome]) -> list[bool]:
    """Whether each request was answered by the instance chosen for it, which was given no other request in between.

    A request disturbs from its arrival on the instance chosen for it, and from its dispatch on the one that it was
    moved to. Among requests that arrive together, the later ones in order disturb the earlier ones.
    """
    given: dict[str, list[tuple[float, int]]] = {}
    for index, outcome in enumerate(outcomes):
        if outcome.chosen_id:
            given.setdefault(outcome.chosen_id, []).append((outcome.arrival_s, index))
        if outcome.instance_id != outcome.chosen_id and outcome.dispatched_s is not None:
            given.setdefault(outcome.instance_id, []).append((outcome.dispatched_s, index))
    kept = [False] * len(outcomes)
    for instance_id, moments in given.items():
        moments.sort()
        following_s = [moment_s for moment_s, _ in moments[1:]] + [float("inf")]
        for (_, index), next_s in zip(moments, following_s, strict=True):
            outcome = outcomes[index]
            if outcome.instance_id == outcome.chosen_id == instance_id and outcome.first_token_s is not None:
                kept[index] = outcome.finish_s is not None and next_s > outcome.first_token_s
    return kept


def _relative_errors(outcomes: Sequence[RequestOutcome]) -> Percentiles:
    return Percentiles.of([outcome.ttft_error_s / max(outcome.ttft_s, 1e-9) for outcome in outcomes])


def _timeline(outcomes: Sequence[RequestOutcome], intervals: int = 60) -> list[tuple[float, float, float]]:
    """Share on time and P90 TTFT over the arrivals, in equal intervals of time."""
    if not outcomes:
        return []
    width_s = max(outcomes[-1].arrival_s / intervals, 1e-9)
    buckets: dict[int, list[RequestOutcome]] = {}
    for outcome in outcomes:
        buckets.setdefault(min(int(outcome.arrival_s / width_s), intervals - 1), []).append(outcome)
    return [
        (
            (index + 0.5) * width_s,
            sum(outcome.on_time for outcome in bucket) / len(bucket),
            quantile(sorted(outcome.ttft_s for outcome in bucket), 0.9),
        )
        for index, bucket in sorted(buckets.items())
    ]


def _by_instance(
    outcomes: Sequence[RequestOutcome], intervals: int = 40
) -> dict[str, tuple[tuple[float, int, float], ...]]:
    """The requests that each instance was sent over the arrivals, in equal intervals; those without a request are left
    out."""
    if not outcomes:
        return {}
    width_s = max(outcomes[-1].arrival_s / intervals, 1e-9)
    sent: dict[str, dict[int, list[RequestOutcome]]] = {}
    for outcome in outcomes:
        if outcome.instance_id:
            interval = min(int(outcome.arrival_s / width_s), intervals - 1)
            sent.setdefault(outcome.instance_id, {}).setdefault(interval, []).append(outcome)
    return {
        instance_id: tuple(
            ((interval + 0.5) * width_s, len(own), sum(o.cached_tokens for o in own) / sum(o.input_tokens for o in own))
            for interval, own in sorted(by_interval.items())
        )
        for instance_id, by_interval in sorted(sent.items())
    }
