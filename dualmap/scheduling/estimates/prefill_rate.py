"""The prefill rates of instances that are peers: tokens per second where prefills queue. Learned from first tokens.

An engine computes in steps under a token budget. Prefills keep it busy for

    start_s · runs that began on an idle engine + step_s · steps in which prefills end + token_s · uncached tokens

as those steps are not full; what full steps cost whatever they compute is a part of ``token_s``. A ratio of tokens and
seconds would take the one for the other, and follow the size of requests and the load.

Peers (instances of a pool with one role) share these costs. One of them differs from the others by a factor of its own,
which begins at 1, moves only as far as many separate prefills agree, is exactly 1 within noise, and returns to 1 where
no prefill confirms it. A placement by the least estimate needs this: an instance that gets no work never disproves what
was once seen of it.

Instances that are described alike are of one *kind* of hardware, and share what differs from the description: a kind
has a factor of its own over all peers, of which the same holds, and an instance differs from its kind. So an instance
that gets no work is as fast as its like, and a kind of which none works is as fast as it is described.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from math import copysign, exp, log
from statistics import fmean, median

from dualmap.scheduling.estimates.ridge import Ridge
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.values import replaced, value

LEAST_TOKENS = 512
"""Tokens for each step in which prefills end. Fewer teach nothing of the rate: an engine computes them in about the
time in which it reads the weights, which accelerators break even with at 200 to 400 tokens."""
MEMORY_S = 30.0
"""Busy seconds that are remembered, about, for each peer. Idle hours and what teaches nothing forget nothing."""
MOST_TIMES = 4.0
"""Times the expected time that a prefill is counted as at most. One that takes longer says nothing about the rate: the
engine was paused, its first request compiled something, or the measuring clock was set forward. Where prefills do take
so long, the expected time follows, and they are counted in full."""
VARIANCE_S = 0.05
"""Variance of a busy time, per second of it: it adds up, step by step. So the times that are expected add up to those
seen, and those of an engine that now and then decodes for seconds count in full."""

PRIOR_STEP_SHARE, PRIOR_STEP_S = 0.1, 0.025
"""Fixed cost of a step before anything is learned: this share of a full step, and no more than so much. An idle engine
begins at once."""
PRIOR_ERRORS = (0.05, 1.0, 2.0)
"""Usual errors of the prior: of the start in seconds, of the step and token costs as shares. The rate is a guess or a
default more often than not."""
LEAST_SHARE = 0.02
"""Least cost of a token that is believed, as a share of the prior's."""
MOST_STEP_TOKENS = 16_384
"""Token budget that is believed at most; a dispatch window without a limit has none."""
MOST_STEPS = 8
"""Full steps that are taken together. What the edges take from others, and give to them, is little against so many."""
SAME_STEP_MS = 8
"""First tokens that come so close were computed in one step; less than a step takes."""

PRIOR_RUNS = 3.0
"""Runs that the belief "as fast as its peers" counts for."""
MEMORY_RUNS = 24.0
"""Runs of an instance that its factor is learned from, about."""
LEAST_BUSY_S = 0.001
"""The clock counts milliseconds."""
MOST_SURPRISE = 0.8
"""Logarithm by which one run moves the belief at most, as if it were only so far from what was expected."""
NOISE, NOISE_ERRORS = 0.12, 2.5
"""Logarithm of a factor that is no difference, however many runs show it; and standard errors that are none."""
CONFIRMED_S, FORGOTTEN_S = 5.0, 20.0
"""Idle seconds up to which the factor of an instance counts in full, and after which it is forgotten."""

PUBLISHED_SHARE = 0.01
"""A smaller change of a rate is not published."""


@value
class BusyTime:
    """Prefills that followed each other without a gap.

    An engine is busy with a prefill from the later of its dispatch and the former one's end. Prefills that one step
    computed together end together, and one that ends leaves a part of its last step to the next: only together they
    have their right time.
    """

    tokens: int
    """Uncached tokens that were prefilled."""
    ends: int
    """Steps in which prefills ended."""
    began_ms: int
    ended_ms: int
    starts: int = 0
    """1 if the engine was idle before, else 0."""

    def with_next(self, other: BusyTime) -> BusyTime:
        """Both together; ``other`` begins where this one ends."""
        same_step = other.ended_ms - self.ended_ms <= SAME_STEP_MS
        ends = self.ends + (0 if same_step else other.ends)
        return BusyTime(self.tokens + other.tokens, ends, self.began_ms, other.ended_ms, self.starts)

    @property
    def busy_s(self) -> float:
        return (self.ended_ms - self.began_ms) / 1000

    @property
    def features(self) -> tuple[float, float, float]:
        """The features that the costs weigh."""
        return float(self.starts), float(self.ends), float(self.tokens)

    @property
    def teaches(self) -> bool:
        return self.tokens >= LEAST_TOKENS * self.ends


def runs_of(times: Iterable[BusyTime], step_tokens: float) -> Iterator[BusyTime]:
    """The prefills of one instance, in order, with those together that followed each other without a gap."""
    together: BusyTime | None = None
    for time in times:
        if together is not None and _goes_on(together, time, step_tokens):
            together = together.with_next(time)
            continue
        if together is not None:
            yield together
        together = time
    if together is not None:
        yield together


def _goes_on(time: BusyTime, other: BusyTime, step_tokens: float) -> bool:
    """Whether the other one followed without a gap, and there is room for it."""
    if other.began_ms != time.ended_ms:
        return False
    return time.tokens < MOST_STEPS * step_tokens or other.ended_ms - time.ended_ms <= SAME_STEP_MS


def step_tokens_of(load: InstanceLoad) -> float:
    """Token budget of a step."""
    return min(max(1.0, load.dispatch_window_tokens / 2), MOST_STEP_TOKENS)


@value
class RateEvidence:
    """How much longer the runs of one instance take than the costs say: a mean of logarithms, which no single run
    moves far."""

    total: float = 0.0
    weight: float = 0.0
    """Number of runs that count."""
    squares: float = 0.0
    """Sum of the squared distances from what was believed."""
    seen_ms: int = 0
    """End of the last run."""

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    @property
    def share(self) -> float:
        """The part of the difference from the peers that is believed."""
        return self.weight / (self.weight + PRIOR_RUNS)

    def believed(self, common: float) -> float:
        """The expectation for the next run, where peers have ``common``."""
        return common + self.share * (self.mean - common)

    def with_run(self, seen: float, common: float, ended_ms: int) -> RateEvidence:
        believed = self.believed(common)
        surprise = min(MOST_SURPRISE, max(-MOST_SURPRISE, seen - believed))
        keep = min(1.0, (MEMORY_RUNS - 1.0) / max(1.0, self.weight))
        return RateEvidence(
            keep * self.total + believed + surprise,
            keep * self.weight + 1.0,
            keep * self.squares + surprise**2,
            ended_ms,
        )

    def shifted(self, by: float) -> RateEvidence:
        """Return the evidence relative to changed costs."""
        return replaced(self, total=self.total + by * self.weight)

    def after_idle(self, idle_ms: float) -> RateEvidence:
        """The part that still counts after the instance had nothing to prefill for so long."""
        kept = min(1.0, max(0.0, (FORGOTTEN_S - idle_ms / 1000) / (FORGOTTEN_S - CONFIRMED_S)))
        return RateEvidence(kept * self.total, kept * self.weight, kept * self.squares, self.seen_ms)


_NO_EVIDENCE = RateEvidence()


Kind = tuple[float, int]
"""The description that instances of one kind share: prefill rate and KV memory."""


def kind_of(spec: InstanceSpec) -> Kind:
    return spec.prefill_tokens_per_s, spec.kv_capacity_tokens


def _factors(evidence: Mapping[str, RateEvidence], kinds: Mapping[str, Kind]) -> dict[str, float]:
    """The factor of time that each of ``kinds`` takes beside the usual: that of its kind, times its own. Either is 1
    within noise, and all of a difference beyond twice that (firm thresholding)."""
    weight = sum(own.weight for own in evidence.values())
    variance = sum(own.squares for own in evidence.values()) / weight if weight else 0.0
    common, of_kinds = _common(evidence.values()), _of_kinds(evidence, kinds)
    factors: dict[str, float] = {}
    for name, kind in kinds.items():
        own, of_kind = evidence.get(name, _NO_EVIDENCE), of_kinds.get(kind)
        usual = common if of_kind is None else of_kind.believed(common)
        shared = 0.0 if of_kind is None else _beyond_noise(usual - common, variance, of_kind.weight)
        factors[name] = exp(shared + _beyond_noise(own.believed(usual) - usual, variance, own.weight))
    return factors


def _beyond_noise(difference: float, variance: float, runs: float) -> float:
    """The part of a difference that is believed after so many runs."""
    noise, size = (NOISE**2 + NOISE_ERRORS**2 * variance / max(1.0, runs)) ** 0.5, abs(difference)
    return copysign(min(size, 2 * max(0.0, size - noise)), difference)


@dataclass(slots=True)
class PeerRates:
    """Costs that peers share, as learned so far, and how much each peer differs."""

    costs: Ridge
    """``start_s``, ``step_s`` and ``token_s`` of one that was described with the usual rate."""
    usual_tokens_per_s: float
    """Median of the rates that peers were described with: a description is a reason to differ."""
    _evidence: dict[str, RateEvidence] = field(default_factory=dict)
    _factors: dict[str, float] = field(default_factory=dict)
    """Factors as last published, which the costs are learned with."""

    @classmethod
    def prior(cls, loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec]) -> PeerRates:
        """The belief before the first prefill: the published rates of these peers, at least one."""
        usual = median(instances[name].prefill_tokens_per_s for name in loads)
        shares = [load.prefill_tokens_per_s / instances[name].prefill_tokens_per_s for name, load in loads.items()]
        step_tokens = median(map(step_tokens_of, loads.values()))
        mean_s = 1.0 / (usual * median(shares))
        step_s = min(PRIOR_STEP_SHARE * mean_s * step_tokens, PRIOR_STEP_S)
        token_s = mean_s - step_s / step_tokens
        start_error_s, step_error, token_error = PRIOR_ERRORS
        errors = start_error_s, step_error * step_s, token_error * token_s
        return cls(Ridge.of((0.0, step_s, token_s), errors, (0.0, 0.0, LEAST_SHARE * token_s)), usual)

    def learn(
        self,
        times: Mapping[str, Iterable[BusyTime]],
        loads: Mapping[str, InstanceLoad],
        instances: Mapping[str, InstanceSpec],
    ) -> None:
        """Take in more prefills of some of the peers, each one's in order."""
        runs = [
            (run, name, run.busy_s * instances[name].prefill_tokens_per_s / self.usual_tokens_per_s)
            for name, seen in times.items()
            for run in runs_of(seen, step_tokens_of(loads[name]))
            if run.teaches
        ]
        if not runs:
            return
        runs.sort(key=lambda each: each[0].ended_ms)
        memory_s = MEMORY_S * max(1, sum(load.state is InstanceState.READY for load in loads.values()))
        costs = self.costs
        for run, name, busy_s in runs:
            costs = _with(costs, run, busy_s / self._factors.get(name, 1.0), memory_s)
        costs = costs.solved()
        shift = fmean(log(self.costs.expected(run.features) / costs.expected(run.features)) for run, _, _ in runs)
        self.costs = costs
        evidence = {name: own.shifted(shift) for name, own in self._evidence.items()}
        kinds = {name: kind_of(spec) for name, spec in instances.items() if name in evidence or name in times}
        common, of_kinds = _common(evidence.values()), _of_kinds(evidence, kinds)
        for run, name, busy_s in runs:
            of_kind = of_kinds.get(kinds[name])
            usual = common if of_kind is None else of_kind.believed(common)
            own = evidence.get(name, _NO_EVIDENCE)
            excess = log(max(busy_s, LEAST_BUSY_S) / costs.expected(run.features))
            evidence[name] = own.after_idle(run.began_ms - own.seen_ms).with_run(excess, usual, run.ended_ms)
        self._evidence = evidence

    def rates(
        self, loads: Mapping[str, InstanceLoad], instances: Mapping[str, InstanceSpec], now_ms: int
    ) -> dict[str, float]:
        """The rate of each peer; never under 1, so that it can be divided by."""
        # The clock may have been set back: what it called later is now.
        for name, own in self._evidence.items():
            if own.seen_ms > now_ms:
                self._evidence[name] = replaced(own, seen_ms=now_ms)
        left = {
            name: own.after_idle(now_ms - own.seen_ms - 1000 * loads[name].stalled_s)
            for name, own in self._evidence.items()
            if name in loads
        }
        self._factors = _factors(left, {name: kind_of(instances[name]) for name in loads})
        return {name: self._rate(load, instances[name]) for name, load in loads.items()}

    def _rate(self, load: InstanceLoad, spec: InstanceSpec) -> float:
        _, step_s, token_s = self.costs.weights
        cost_s = (token_s + step_s / step_tokens_of(load)) * self._factors.get(load.instance_id, 1.0)
        return max(1.0, spec.prefill_tokens_per_s / self.usual_tokens_per_s / cost_s)

    def forget_all_but(self, names: Set[str]) -> None:
        """Drop what is known of other peers alone."""
        self._evidence = {name: own for name, own in self._evidence.items() if name in names}


def _common(evidence: Iterable[RateEvidence]) -> float:
    """The usual logarithm among peers: their mean, each counted by how sure it is. One alone differs from nothing."""
    shares, total = 0.0, 0.0
    for own in evidence:
        shares += own.share
        total += own.share * own.mean
    return total / shares if shares else 0.0


def _of_kinds(evidence: Mapping[str, RateEvidence], kinds: Mapping[str, Kind]) -> dict[Kind, RateEvidence]:
    """The evidence of each kind, all of its instances together; none where all are of one kind."""
    if len(set(kinds.values())) < 2:
        return {}
    together: dict[Kind, RateEvidence] = {}
    for name, own in evidence.items():
        kind = kinds.get(name)
        if kind is not None and own.weight:
            former = together.get(kind, _NO_EVIDENCE)
            together[kind] = RateEvidence(former.total + own.total, former.weight + own.weight)
    return together


def _with(costs: Ridge, run: BusyTime, busy_s: float, memory_s: float) -> Ridge:
    expected_s = costs.expected(run.features)
    busy_s = min(busy_s, MOST_TIMES * expected_s)
    usual_error, keep = (VARIANCE_S * expected_s) ** 0.5, memory_s / (memory_s + busy_s)
    return costs.observed(run.features, busy_s, usual_error=usual_error, keep=keep)
