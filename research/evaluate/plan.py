"""How much an evaluation runs: sizes, rates, policies. Everything else follows from the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from dualmap.scheduling.settings import POLICIES, PolicyName, SchedulingSettings
from dualmap.simulation.bounds import sustainable_rate
from dualmap.simulation.engine_types import EngineConfig
from dualmap.simulation.presets import find_preset
from dualmap.simulation.scenario import Scenario
from dualmap.simulation.sources import TraceSource

PAPER_INSTANCES = 8
PAPER_SLO_S = 5.0
PAPER_CAPS = {"qwen2.5-7b-910b4": 20_480, "qwen2.5-14b-910b3": 10_240}
TRACE_TITLES = {"conversation": "Conversation", "toolagent": "Tool&Agent", "agents": "Agent sessions"}
"""As reports write them."""
ABLATIONS: tuple[PolicyName, ...] = (
    "dualmap-cache-affinity",
    "dualmap-least-loaded",
    "dualmap-min-ttft",
    "dualmap-no-rebalance",
    "dualmap",
)
CONTENDERS: tuple[PolicyName, ...] = ("dualmap", "min-ttft", "preble", "dynamo", "sglang", "llm-d", "llm-d-latency")
"""DualMap and the policies of other projects."""
DEFAULT_POLICY: PolicyName = SchedulingSettings().policy
"""The product's own, not the paper's."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace on a kind of instance."""

    name: str
    label: str
    source: TraceSource
    engine: EngineConfig
    skip_requests: int
    reference_rate_per_s: float
    """The rate at which PAPER_INSTANCES instances can sustain all requests: rates are given as parts of it."""

    def rate(self, load_factor: float, instances: int = PAPER_INSTANCES) -> float:
        return load_factor * self.reference_rate_per_s * instances / PAPER_INSTANCES


@dataclass(frozen=True, slots=True)
class Plan:
    """One evaluation."""

    name: str
    conversation: str = "conversation"
    """File or generator."""
    toolagent: str = "toolagent"
    conversation_requests: int = 4000
    toolagent_requests: int = 8000
    skip_requests: int = 500
    policies: tuple[PolicyName, ...] = POLICIES
    load_factors: tuple[float, ...] = (0.5, 0.65, 0.75, 0.85, 0.95, 1.1, 1.3)
    goodput_tolerance: float = 0.015
    scalability: tuple[int, ...] = (8, 16, 24, 32)
    requests_per_instance: int = 1000
    scaling_requests: int = 6000
    day_requests: int = 43_000
    day_s: int = 7200
    constant_s: int = 5400
    constant_seeds: int = 3
    balance_requests: int = 20_000
    balance_trials: int = 20
    overhead_sizes: tuple[int, ...] = (8, 16, 32, 64)
    overhead_repetitions: int = 3000
    seed: int = 1
    engine_changes: str = ""
    """To the engine of every preset, as behind a preset's name."""

    def workloads(self) -> tuple[Workload, ...]:
        """Both traces on both presets, as in the paper."""
        return tuple(self.workload(trace, preset) for trace in ("conversation", "toolagent") for preset in PAPER_CAPS)

    def workload(self, trace: str, preset: str, requests: int | None = None) -> Workload:
        """``trace`` is 'conversation' or 'toolagent'; raises TraceError when its file is broken."""
        source_text = self.conversation if trace == "conversation" else self.toolagent
        default = self.conversation_requests if trace == "conversation" else self.toolagent_requests
        source = TraceSource(source_text, requests or default, PAPER_CAPS[preset], seed=self.seed)
        engine, size = find_preset(f"{preset}:{self.engine_changes}").engine, preset.split("-")[1]
        loaded = source.load()
        skip = min(self.skip_requests, len(loaded.requests) // 4)
        return Workload(
            name=f"{trace}-{size}",
            label=f"{TRACE_TITLES[trace]}, {size.upper()}",
            source=source,
            engine=engine,
            skip_requests=skip,
            reference_rate_per_s=sustainable_rate(loaded, engine, PAPER_INSTANCES, share=1.0, skip=skip),
        )

    def generated(self, generator: str, requests: int, preset: str = "qwen2.5-7b-910b4") -> Workload:
        """Generated Tool&Agent requests on the curve of ``generator``, with Tool&Agent's sustainable rate."""
        like = self.workload("toolagent", preset, self.scaling_requests)
        source = TraceSource(generator, requests, PAPER_CAPS[preset], seed=self.seed)
        return replace(like, name=generator, label=generator, source=source)


FULL = Plan("full")
QUICK = replace(
    FULL,
    name="quick",
    conversation_requests=1500,
    toolagent_requests=2200,
    skip_requests=250,
    load_factors=(0.65, 0.85, 1.0),
    goodput_tolerance=0.03,
    scalability=(8, 16, 32),
    requests_per_instance=250,
    scaling_requests=2400,
    day_requests=10_000,
    day_s=1800,
    constant_s=2700,
    constant_seeds=1,
    balance_requests=5000,
    balance_trials=5,
    overhead_sizes=(8, 32),
    overhead_repetitions=1000,
)


def policy_title(policy: str) -> str:
    """As sentences in the report have it."""
    return "DualMap" if policy == "dualmap" else policy


Order = Literal["auto", "fifo", "deadline"]


def scheduling_for(policy: PolicyName, order: Order = "auto") -> SchedulingSettings:
    """The product's defaults, which show every policy at its best; the paper's own for DualMap.

    ``dualmap-least-cost`` is this project's and made for deadline order; all others serve first come, first served,
    unless ``order`` says otherwise.
    """
    return SchedulingSettings(policy=policy, slo_ttft_s=PAPER_SLO_S, queue_order=order)


def scenario_for(
    policy: PolicyName, workload: Workload, instances: int = PAPER_INSTANCES, order: Order = "auto"
) -> Scenario:
    return Scenario(
        scheduling_for(policy, order), workload.engine, instances=instances, skip_requests=workload.skip_requests,
        labels={"workload": workload.name},
    )  # fmt: skip
