"""Suites: which traces, engines and fleets an experiment covers, and the competitors of the standard one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import MappingProxyType

from dualmap.research.evaluate.plan import PAPER_CAPS, TRACE_TITLES
from dualmap.simulation.errors import TraceError
from dualmap.simulation.generators import GeneratorSpec
from dualmap.simulation.sources import TraceSource

PRESET_SHORTHANDS: Mapping[str, str] = MappingProxyType({preset.split("-")[1]: preset for preset in PAPER_CAPS})
WARM_UP_SHARE = 8
AGENTS_SLO_S = 15.0
"""The prefill of a whole context takes longer than 5 s on these engines, on an idle instance too."""

OTHERS = ("dualmap", "llm-d", "llm-d-latency", "preble", "min-ttft", "dynamo", "sglang")
"""The best other policies, each at its best settings."""
BEST_OTHERS = ("preble", "llm-d-latency", "sglang")
"""Those that are ever the best other over mixed instances in the tables of the documents."""
ORDERS = ("deadline", "fifo")
PEERS = tuple(f"{policy} fifo={policy},queue_order=fifo" for policy in OTHERS)
"""As their projects ship them: first come, first served. Together they define saturation."""
OURS = "least-cost deadline=dualmap-least-cost,queue_order=deadline"
OWN_QUEUES = (
    "llm-d-latency own=llm-d-latency,queue_order=fifo,router_queue=llm-d-deadline",
    "dynamo own=dynamo,queue_order=fifo,router_queue=dynamo-wspt",
)
"""With the queues and orders that their own routers have, see ``simulation.router_queue``."""


def peers(of: str) -> tuple[str, ...]:
    """``PEERS``; of ``preble+sglang`` those two, of roles all of them over a fleet with these, every request split."""
    if names_policies(of):
        return tuple(f"{policy} fifo={policy},queue_order=fifo" for policy in of.split("+"))
    return tuple(f"{peer},roles={of},split.mode=always" for peer in PEERS) if of else PEERS


def names_policies(of: str) -> bool:
    """Whether a saturation is that of policies, joined by ``+``, rather than of roles."""
    return set(of.split("+")) <= set(OTHERS)


CROSSED = tuple(
    f"{name} {order}={policy},queue_order={order}"
    for order in ORDERS
    for name, policy in (("least-cost", "dualmap-least-cost"), *((other, other) for other in OTHERS))
)
CROSSED += OWN_QUEUES
"""Every policy with both orders, so that what the order does is not taken for placement. Ours is the first."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of traffic; a seed makes it a trace."""

    name: str
    source: str
    """Generator or file."""
    capped: bool = False
    """Cut prompts as the paper does."""
    file: str = ""
    """A recording of the same traffic, used instead if a folder holds it."""
    slo_ttft_s: float | None = None
    """Its TTFT SLO; None: the variants' own."""
    warm_up_share: int = WARM_UP_SHARE
    """One in so many requests, at the start, loads the fleet and stays out of the results."""

    @property
    def is_file(self) -> bool:
        return GeneratorSpec.parse(self.source) is None


WORKLOADS = (
    Workload("conversation", "conversation", capped=True, file="conversation_trace.jsonl"),
    Workload("toolagent", "toolagent", capped=True, file="toolagent_trace.jsonl"),
    Workload("coding", "coding"),
    Workload("uniform", "uniform"),
    Workload("hotspot", "hotspot"),
    # A third: every session that is under way at the start sends its whole context once to cold caches.
    Workload("agents", "agents", slo_ttft_s=AGENTS_SLO_S, warm_up_share=3),
)


@dataclass(frozen=True, slots=True)
class Suite:
    """What an experiment covers, its competitors apart."""

    name: str
    workloads: tuple[Workload, ...] = WORKLOADS
    presets: tuple[str, ...] = tuple(PAPER_CAPS)
    sizes: tuple[int, ...] = (8, 32)
    rates: tuple[str, ...] = ("0.8x", "0.9x", "1x", "1.2x", "1.5x")
    """Requests per second, or with an x multiples of the saturation rate."""
    goodput: bool = True
    targets: tuple[str, ...] = ("90", "95", "99", "both")
    """What a goodput is the highest rate of, see ``targets``."""
    seeds: int = 5
    requests_per_instance: int = 400
    tolerance: float = 0.01
    """Relative width of a goodput's bracket."""
    saturation_of: str = ""
    """What rates are multiples of the saturation of, see ``peers``; empty: of all of them, over mixed instances."""
    one_at_a_time: bool = False
    """Every preset with the first size, and the first preset with every size; otherwise all with all."""
    least_requests: int = 0
    """Of a trace, however few the instances are."""


STANDARD = Suite("standard")
QUICK = Suite(
    "quick",
    workloads=WORKLOADS[:3],
    presets=("qwen2.5-7b-910b4",),
    sizes=(8,),
    rates=("0.9x", "1.5x"),
    targets=("90", "99"),
    seeds=2,
    requests_per_instance=125,
    tolerance=0.03,
)
PUBLISHED = Suite(
    "published",
    sizes=(8,),
    rates=("0.8x", "1x", "1.2x", "1.5x"),
    seeds=3,
    requests_per_instance=150,
    tolerance=0.02,
)
"""What the tables of the documents come from."""
SPLITS = Suite(
    "splits",
    workloads=WORKLOADS[:2],
    presets=("qwen2.5-7b-910b4",),
    sizes=(8,),
    rates=("0.9x",),
    goodput=False,
    seeds=10,
    requests_per_instance=100,
    tolerance=0.02,
    saturation_of="4P4D",
)
"""Prefill and decode apart: every policy over fleets of eight."""
SPLIT_OR_WHOLE = replace(
    SPLITS,
    name="split-or-whole",
    workloads=(*WORKLOADS[:2], Workload("thinking", "thinking", capped=True)),
    rates=("0.5x", "0.9x"),
)
"""The default policy's choice between splitting a request and serving it whole, beside always and never."""
_7B, _14B = PAPER_CAPS
VARIATIONS = Suite(
    "variations",
    presets=(
        _7B,
        _14B,
        f"{_7B}:prefill_first",
        f"{_7B}:kv_capacity_tokens=500000",
        f"{_7B}:kv_capacity_tokens=4000000",
        f"{_7B}:max_num_batched_tokens=512",
        f"{_7B}:max_num_batched_tokens=8192",
        f"{_7B}:prefill_speed=3",
    ),
    sizes=(8, 2, 32),
    rates=("1x", "1.3x"),
    goodput=False,
    seeds=4,
    requests_per_instance=60,
    tolerance=0.03,
    saturation_of="preble+llm-d-latency",
    one_at_a_time=True,
    least_requests=480,
)
"""The default policy on other engines and other sizes of fleet, beside those that are best on the usual ones. Many
seeds of short traces: for the same time they leave less to chance than few long ones."""
SUITES: Mapping[str, Suite] = MappingProxyType(
    {suite.name: suite for suite in (STANDARD, QUICK, PUBLISHED, SPLITS, SPLIT_OR_WHOLE, VARIATIONS)}
)
MIXED = "mixed"
VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        VARIATIONS.name: tuple(
            f"{name} {order}={policy},queue_order={order}"
            for order in ORDERS
            for name, policy in (("least-cost", "dualmap-least-cost"), *((other, other) for other in BEST_OTHERS))
        ),
        SPLITS.name: (
            *(
                f"{policy} {roles}={policy}" + ("" if roles == MIXED else f",roles={roles},split.mode=always")
                for roles in (MIXED, "4P4D", "5P3D", "6P2D")
                for policy in ("dualmap-least-cost", *OTHERS, "least-loaded", "cache-affinity", "round-robin")
            ),
            "dualmap-least-cost fifo 4P4D=dualmap-least-cost,queue_order=fifo,roles=4P4D,split.mode=always",
            *(
                f"{policy} deadline 4P4D={policy},queue_order=deadline,roles=4P4D,split.mode=always"
                for policy in OTHERS
            ),
        ),
        SPLIT_OR_WHOLE.name: (
            f"whole {MIXED}=dualmap-least-cost",
            *(
                f"{mode} {roles}=dualmap-least-cost,roles={roles},split.mode={mode}"
                for roles in ("2P6D", "3P5D", "4P4D", "5P3D", "6P2D")
                for mode in ("auto", "always", "never")
            ),
        ),
    }
)
"""Of suites that compare other things than orders; the others have ``CROSSED``."""


def workload_of(name: str, folder: Path | None) -> Workload:
    """A workload of a suite, from its recording if ``folder`` holds it, or any generator or file; behind an
    ``@`` the TTFT SLO in seconds, as ``agents@30``.

    Raises:
        TraceError: a generator's options are wrong, or the SLO.
    """
    name, at, slo = name.rpartition("@") if "@" in name else (name, "", "")
    if at:
        return replace(workload_of(name, folder), slo_ttft_s=_slo_s(name, slo))
    suites = (STANDARD, *SUITES.values())
    known = next((each for suite in suites for each in suite.workloads if each.name == name), None)
    if known is None:
        return Workload(Path(name).stem if GeneratorSpec.parse(name) is None else name, name)
    return recorded(known, folder)


def _slo_s(name: str, text: str) -> float:
    try:
        slo_s = float(text)
    except ValueError:
        slo_s = 0.0
    if not 0 < slo_s < inf:
        raise TraceError(name, None, f"the SLO behind @ must be seconds above 0, found {text!r}")
    return slo_s


def recorded(workload: Workload, folder: Path | None) -> Workload:
    if folder is None or not workload.file or not (folder / workload.file).is_file():
        return workload
    return replace(workload, source=str(folder / workload.file), file="")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A workload on a number of instances of one kind: what one goodput belongs to, without the seed."""

    workload: Workload
    preset: str
    instances: int
    requests: int

    @property
    def title(self) -> str:
        return f"{self.workload_title}, {self.instances_title}"

    @property
    def workload_title(self) -> str:
        slo = "" if self.workload.slo_ttft_s is None else f" in {self.workload.slo_ttft_s:g} s"
        return f"{TRACE_TITLES.get(self.workload.name, self.workload.name)}{slo}"

    @property
    def instances_title(self) -> str:
        base, _, changes = self.preset.partition(":")
        engine = f"{base.split('-')[1].upper()} {changes.replace('_', ' ').replace('+', ', ')}".strip()
        return f"{self.instances} × {engine}"

    @property
    def skip_requests(self) -> int:
        return self.requests // self.workload.warm_up_share

    @property
    def counted_requests(self) -> int:
        return self.requests - self.skip_requests

    def source(self, seed: int) -> TraceSource:
        """Seed 1, 2, … of a generator; of a file its first, second, … window."""
        cap = PAPER_CAPS.get(self.preset.partition(":")[0]) if self.workload.capped else None
        if self.workload.is_file:
            return TraceSource(self.workload.source, self.requests, cap, start=(seed - 1) * self.requests)
        return TraceSource(self.workload.source, self.requests, cap, seed=seed)

    def seeds(self, wanted: int) -> tuple[int, ...]:
        """As many seeds as wanted; of a file as many as it has whole windows, which do not overlap.

        Raises:
            TraceError: the trace is broken, or shorter than one window.
        """
        if not self.workload.is_file:
            self.source(1).load()
            return tuple(range(1, wanted + 1))
        length = len(TraceSource(self.workload.source).load().requests)
        if length < self.requests:
            reason = f"has {length} requests, fewer than the {self.requests} of one window ({self.title})"
            raise TraceError(self.workload.source, None, reason)
        return tuple(range(1, min(wanted, length // self.requests) + 1))


def fleets(suite: Suite) -> tuple[Fleet, ...]:
    return tuple(
        Fleet(workload, preset, size, max(size * suite.requests_per_instance, suite.least_requests))
        for workload in suite.workloads
        for preset in suite.presets
        for size in suite.sizes
        if not suite.one_at_a_time or preset == suite.presets[0] or size == suite.sizes[0]
    )
