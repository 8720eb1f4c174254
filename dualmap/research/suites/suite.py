"""Suites: studies that are a matrix. Every variant under every workload at every rate with every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from types import MappingProxyType

from dualmap.research.workload import PAPER_CAPS, TRAFFIC, Traffic, Workload, traffic_of

OTHERS = ("dualmap", "llm-d", "llm-d-latency", "preble", "min-ttft", "dynamo", "sglang")
"""The best other policies, each at its best settings."""
BEST_OTHERS = ("preble", "llm-d-latency", "sglang")
"""Policies that are ever the best other over mixed instances in the tables of the documents."""
ORDERS = ("deadline", "fifo")
PEERS = tuple(f"{policy} fifo={policy},queue_order=fifo" for policy in OTHERS)
"""Policies as their projects ship them: first come, first served. Together they define saturation."""
OURS = "least-cost deadline=dualmap-least-cost,queue_order=deadline"
OWN_QUEUES = (
    "llm-d-latency own=llm-d-latency,queue_order=fifo,router_queue=llm-d-deadline",
    "dynamo own=dynamo,queue_order=fifo,router_queue=dynamo-wspt",
)
"""Policies with the queues and orders that their own routers have, see ``simulation.virtual_time.router_queue``."""


def peers(of: str) -> tuple[str, ...]:
    """``PEERS``; of ``preble+sglang`` those two, of roles all of them over a fleet with these, every request split."""
    if names_policies(of):
        return tuple(f"{policy} fifo={policy},queue_order=fifo" for policy in of.split("+"))
    return tuple(f"{peer},roles={of},split.mode=always" for peer in PEERS) if of else PEERS


def names_policies(of: str) -> bool:
    """Whether a saturation is that of policies, joined by ``+``, rather than of roles."""
    return set(of.split("+")) <= set(OTHERS)


def crossed(others: Sequence[str]) -> tuple[str, ...]:
    """Ours and the others with both orders, so that what the order does is not taken for placement. Ours is first."""
    return tuple(
        f"{name} {order}={policy},queue_order={order}"
        for order in ORDERS
        for name, policy in (("least-cost", "dualmap-least-cost"), *((other, other) for other in others))
    )


CROSSED = (*crossed(OTHERS), *OWN_QUEUES)
MIXED = "mixed"
"""The name of a fleet without roles."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A matrix, as data."""

    name: str
    _: KW_ONLY
    traffic: tuple[Traffic, ...] = TRAFFIC[:6]
    presets: tuple[str, ...] = tuple(PAPER_CAPS)
    sizes: tuple[int, ...] = (8, 32)
    rates: tuple[str, ...] = ("0.8x", "0.9x", "1x", "1.2x", "1.5x")
    """Requests per second, or with an x multiples of the saturation rate."""
    goodput: bool = True
    targets: tuple[str, ...] = ("90", "95", "99", "both")
    """Targets of which a goodput is the highest rate, see ``targets``."""
    seeds: int = 5
    requests_per_instance: int = 400
    tolerance: float = 0.01
    """Relative width of a goodput's bracket."""
    saturation_of: str = ""
    """Variants whose saturation rates are multiples of, see ``peers``; empty: all of them, over mixed instances."""
    one_at_a_time: bool = False
    """Every preset with the first size, and the first preset with every size; otherwise all with all."""
    least_requests: int = 0
    """Length of a trace at least, however few the instances are."""
    variants: tuple[str, ...] = CROSSED
    """The competitors, as a command line has them; the first is compared with the best of the others."""


STANDARD = Suite("standard")
QUICK = Suite(
    "quick",
    traffic=TRAFFIC[:3],
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
"""The suite from which the tables of the documents come."""
SPLITS = Suite(
    "splits",
    traffic=TRAFFIC[:2],
    presets=("qwen2.5-7b-910b4",),
    sizes=(8,),
    rates=("0.9x",),
    goodput=False,
    seeds=10,
    requests_per_instance=100,
    tolerance=0.02,
    saturation_of="4P4D",
    variants=(
        *(
            f"{policy} {roles}={policy}" + ("" if roles == MIXED else f",roles={roles},split.mode=always")
            for roles in (MIXED, "4P4D", "5P3D", "6P2D")
            for policy in ("dualmap-least-cost", *OTHERS, "least-loaded", "cache-affinity", "round-robin")
        ),
        "dualmap-least-cost fifo 4P4D=dualmap-least-cost,queue_order=fifo,roles=4P4D,split.mode=always",
        *(f"{policy} deadline 4P4D={policy},queue_order=deadline,roles=4P4D,split.mode=always" for policy in OTHERS),
    ),
)
"""Prefill and decode apart: every policy over fleets of eight."""
SPLIT_OR_WHOLE = replace(
    SPLITS,
    name="split-or-whole",
    traffic=(*TRAFFIC[:2], traffic_of("thinking")),
    rates=("0.5x", "0.9x"),
    variants=(
        f"whole {MIXED}=dualmap-least-cost",
        *(
            f"{mode} {roles}=dualmap-least-cost,roles={roles},split.mode={mode}"
            for roles in ("2P6D", "3P5D", "4P4D", "5P3D", "6P2D")
            for mode in ("auto", "always", "never")
        ),
    ),
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
    variants=crossed(BEST_OTHERS),
)
"""The default policy on other engines and other sizes of fleet, beside those that are best on the usual ones. Many
seeds of short traces: for the same time they leave less to chance than few long ones."""
CHANGING = Suite(
    "changing",
    traffic=tuple(traffic_of(name) for name in ("moving", "shared", "bursts", "onoff", "heavytail")),
    sizes=(8,),
    rates=("1x", "1.3x"),
    goodput=False,
    seeds=4,
    requests_per_instance=120,
    saturation_of="preble+llm-d-latency",
    variants=crossed(BEST_OTHERS),
)
"""Traffic that does not stay as it is: a hot prompt that moves, one that everybody shares, bursts, answers of very
different lengths."""
HALF_SLOW, ONE_SLOW = (
    replace(
        CHANGING,
        name=f"{slow}-slow",
        traffic=TRAFFIC[:3],
        variants=tuple(f"{variant},slow={slow}" for variant in CHANGING.variants),
    )
    for slow in ("half", "one")
)
"""Fleets of which half of the instances, or one, is half as fast as the others."""
SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        suite.name: suite
        for suite in (STANDARD, QUICK, PUBLISHED, SPLITS, SPLIT_OR_WHOLE, VARIATIONS, CHANGING, HALF_SLOW, ONE_SLOW)
    }
)
"""Suites by name. A new suite is a value above and its name here."""


def workloads_of(suite: Suite) -> tuple[Workload, ...]:
    return tuple(
        Workload(traffic, preset, size, max(size * suite.requests_per_instance, suite.least_requests))
        for traffic in suite.traffic
        for preset in suite.presets
        for size in suite.sizes
        if not suite.one_at_a_time or preset == suite.presets[0] or size == suite.sizes[0]
    )
