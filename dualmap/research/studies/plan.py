"""How much an evaluation runs: sizes, rates, policies; and its workloads, variants and runs, as the paper has them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from dualmap.research.run import Run, Search
from dualmap.research.targets import MAIN, Target
from dualmap.research.variant import Variant, parse_variant
from dualmap.research.workload import PAPER_CAPS, Traffic, Workload, traffic_of
from dualmap.scheduling.settings import POLICIES, PolicyName, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.simulation.capacity.bounds import Bounds
from dualmap.simulation.capacity.goodput import GROWTH
from dualmap.simulation.figures.on_time import TPOT_SLO_S
from dualmap.simulation.workload.traces import Trace

PAPER_INSTANCES = 8
PAPER_SLO_S = 5.0
PRESET, _ = PAPER_CAPS
"""The kind of instance where a study needs one."""
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
_BASE = SchedulingSettings(slo_ttft_s=PAPER_SLO_S)


def variant_of(policy: PolicyName, *settings: str) -> Variant:
    """The policy with the product's defaults, which show each at its best and DualMap as in the paper; ``settings`` as
    a command line has them, ``queue_order=fifo`` for example.

    ``dualmap-least-cost`` is this project's and made for deadline order; all others serve first come, first served.
    """
    return parse_variant(",".join((f"{policy}={policy}", *settings)), _BASE)


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
    _: KW_ONLY
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
    split_loads: tuple[float, ...] = (0.6, 0.9, 1.1)
    """Parts of the saturation of a split."""
    balance_requests: int = 20_000
    balance_trials: int = 20
    overhead_sizes: tuple[int, ...] = (8, 16, 32, 64)
    overhead_repetitions: int = 3000
    seed: int = 1
    engine_changes: str = ""
    """Changes to the engine of every preset, as behind a preset's name."""
    slo_tpot_s: float | None = None
    """SLO of the time per output token, for which goodputs are searched as well; None: they are not."""

    def workloads(self) -> tuple[Workload, ...]:
        """Both traces on both presets, as in the paper."""
        return tuple(self.workload(trace, preset) for trace in ("conversation", "toolagent") for preset in PAPER_CAPS)

    def workload(self, trace: str, preset: str = PRESET, requests: int | None = None) -> Workload:
        """``trace`` is 'conversation' or 'toolagent'; raises TraceError when its file is broken."""
        source = self.conversation if trace == "conversation" else self.toolagent
        default = self.conversation_requests if trace == "conversation" else self.toolagent_requests
        traffic = replace(traffic_of(trace), source=source, file="", slo_tpot_s=self.slo_tpot_s)
        changed = f"{preset}:{self.engine_changes}" if self.engine_changes else preset
        workload = Workload(traffic, changed, PAPER_INSTANCES, requests or default)
        length = len(self.trace(workload).requests)
        return replace(workload, warm_up_requests=min(self.skip_requests, length // 4))

    def generated(self, generator: str, requests: int) -> Workload:
        """Tool&Agent requests on the curve of ``generator``; rates are parts of what ``like_generated`` sustains."""
        traffic = Traffic(generator, generator, capped=True, slo_tpot_s=self.slo_tpot_s)
        return replace(self.like_generated(), traffic=traffic, requests=requests)

    def like_generated(self) -> Workload:
        return self.workload("toolagent", requests=self.scaling_requests)

    def rate(self, workload: Workload, load: float) -> float:
        """A part of the rate that the workload's instances can sustain for all requests."""
        return load * workload.sustainable_per_s(self._seed(workload))

    def trace(self, workload: Workload) -> Trace:
        return workload.source(self._seed(workload)).load()

    def run(self, workload: Workload, variant: Variant, rate_per_s: float | None = None) -> Run:
        return Run(workload, variant, self._seed(workload), rate_per_s)

    def search(
        self, workload: Workload, variant: Variant, start_per_s: float, targets: tuple[Target, ...] = (MAIN,)
    ) -> Search:
        """The goodput with 90 % on time, unless ``targets`` says otherwise."""
        run = self.run(workload, variant, start_per_s)
        return Search(run, targets, tolerance=self.goodput_tolerance, growth=GROWTH)

    def bounds(self, workload: Workload, slo_s: float) -> Bounds:
        return workload.bounds(self._seed(workload), slo_s)

    def _seed(self, workload: Workload) -> int:
        """A file is always read from its start."""
        return 1 if workload.traffic.is_file else self.seed


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
    """The name of a policy in sentences of the report."""
    return "DualMap" if policy == "dualmap" else policy


def rules_of(plan: Plan) -> list[str]:
    """The rules that the reader must know before any figure."""
    window = InstanceSpec("", "").dispatch_window_tokens
    caps = ", ".join(f"{cap:,} ({preset})" for preset, cap in PAPER_CAPS.items())
    return [
        "Simulated in virtual time: the scheduling code and the state of queues are the product's own, the engines are "
        "models, the network takes no time.",
        f"Traces: Conversation from {plan.conversation!r}, Tool&Agent from {plan.toolagent!r}, first "
        f"{plan.conversation_requests:,} and {plan.toolagent_requests:,} requests, the first {plan.skip_requests} left "
        f"out of the figures; prompts capped at {caps} tokens; times scaled to the rate with their bursts; "
        f"seed {plan.seed}.",
        *([f"Engines changed by {plan.engine_changes!r}."] if plan.engine_changes else ()),
        f"TTFT counts from the arrival at the router, time held in the fleet included. SLO {PAPER_SLO_S:g} s; both "
        f"SLOs: and at most {1000 * (plan.slo_tpot_s or TPOT_SLO_S):g} ms per output token.",
        f"DualMap and its variants hold requests in the fleet and dispatch within a window of {window:,} tokens; the "
        "other policies send every request at once, as their own projects do, and see the engines' queues at once.",
        "Other policies run with the product's defaults, which are their projects' parameters or better ones: Dynamo's "
        "prefill scale is the 32 of its own replay, Preble leaves a hot instance at twice the least load.",
        "dualmap is the paper's: queue order first come, first served. dualmap-least-cost is not the paper's: it looks "
        "past the pair and orders its queues by deadline.",
    ]
