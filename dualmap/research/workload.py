"""Workloads: a kind of traffic on a fleet of one kind. A seed makes a workload's trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from types import MappingProxyType

from dualmap.simulation.capacity.bounds import Bounds, bounds_of, sustainable_rate
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import find_preset
from dualmap.simulation.errors import TraceError
from dualmap.simulation.virtual_time.scenario import FleetChange
from dualmap.simulation.workload.generators import GeneratorSpec
from dualmap.simulation.workload.sources import TraceSource

PAPER_CAPS: Mapping[str, int] = MappingProxyType({"qwen2.5-7b-910b4": 20_480, "qwen2.5-14b-910b3": 10_240})
"""The longest prompts of the paper's evaluation by preset, in tokens."""
PRESET_SHORTHANDS: Mapping[str, str] = MappingProxyType({preset.split("-")[1]: preset for preset in PAPER_CAPS})
TRACE_TITLES: Mapping[str, str] = MappingProxyType(
    {"conversation": "Conversation", "toolagent": "Tool&Agent", "agents": "Agent sessions"}
)
"""Names of traffic as reports write them."""
WARM_UP_SHARE = 8
AGENTS_SLO_S = 15.0
"""The prefill of a whole context takes longer than 5 s on these engines, on an idle instance too."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """A kind of requests; a seed makes it a trace."""

    name: str
    source: str
    """Generator or file."""
    capped: bool = False
    """Cut prompts as the paper does."""
    file: str = ""
    """A recording of the same traffic, used instead if a folder holds it."""
    slo_ttft_s: float | None = None
    """TTFT SLO of the traffic; None: the variants' own."""
    slo_tpot_s: float | None = None
    """SLO of the traffic for the time per output token; None: ``on_time.TPOT_SLO_S``."""
    warm_up_share: int = WARM_UP_SHARE
    """One in so many requests, at the start, loads the fleet and stays out of the results."""

    @property
    def is_file(self) -> bool:
        return GeneratorSpec.parse(self.source) is None

    @property
    def title(self) -> str:
        return TRACE_TITLES.get(self.name, self.name)


TRAFFIC = (
    Traffic("conversation", "conversation", capped=True, file="conversation_trace.jsonl"),
    Traffic("toolagent", "toolagent", capped=True, file="toolagent_trace.jsonl"),
    Traffic("coding", "coding"),
    Traffic("uniform", "uniform"),
    Traffic("hotspot", "hotspot"),
    # A third: every session that is under way at the start sends its whole context once to cold caches.
    Traffic("agents", "agents", slo_ttft_s=AGENTS_SLO_S, warm_up_share=3),
    Traffic("thinking", "thinking", capped=True),
)


def traffic_of(name: str, folder: Path | None = None) -> Traffic:
    """The traffic of that name, from its recording if ``folder`` holds it, or any generator or file; behind an
    ``@`` the TTFT SLO in seconds, as ``agents@30``.

    Raises:
        TraceError: a generator's options are wrong, or the SLO.
    """
    name, at, slo = name.rpartition("@") if "@" in name else (name, "", "")
    if at:
        return replace(traffic_of(name, folder), slo_ttft_s=_slo_s(name, slo))
    known = next((each for each in TRAFFIC if each.name == name), None)
    if known is None:
        return Traffic(Path(name).stem if GeneratorSpec.parse(name) is None else name, name)
    return recorded(known, folder)


def _slo_s(name: str, text: str) -> float:
    try:
        slo_s = float(text)
    except ValueError:
        slo_s = 0.0
    if not 0 < slo_s < inf:
        raise TraceError(name, None, f"the SLO behind @ must be seconds above 0, found {text!r}")
    return slo_s


def recorded(traffic: Traffic, folder: Path | None) -> Traffic:
    """The traffic, from its recording if ``folder`` holds one."""
    if folder is None or not traffic.file or not (folder / traffic.file).is_file():
        return traffic
    return replace(traffic, source=str(folder / traffic.file), file="")


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic of a length on a number of instances of one kind: everything of a run but variant, seed and rate."""

    traffic: Traffic
    preset: str
    """The kind of instance; changes of its engine may stand behind a colon, see ``simulation.engine.presets``."""
    instances: int
    requests: int
    warm_up_requests: int | None = None
    """Requests at the start that stay out of the results; None: the traffic's share of all."""
    changes: tuple[FleetChange, ...] = ()
    """Sizes of the fleet later in the run."""

    @property
    def title(self) -> str:
        return f"{self.traffic_title}, {self.instances_title}"

    @property
    def label(self) -> str:
        """Traffic and model alone, where all fleets are alike."""
        return f"{self.traffic.title}, {self._model}"

    @property
    def traffic_title(self) -> str:
        slo = "" if self.traffic.slo_ttft_s is None else f" in {self.traffic.slo_ttft_s:g} s"
        return f"{self.traffic.title}{slo}"

    @property
    def instances_title(self) -> str:
        changes = self.preset.partition(":")[2].replace("_", " ").replace("+", ", ")
        return f"{self.instances} × {f'{self._model} {changes}'.strip()}"

    @property
    def _model(self) -> str:
        return self.preset.partition(":")[0].split("-")[1].upper()

    @property
    def engine(self) -> EngineConfig:
        return find_preset(self.preset).engine

    @property
    def skip_requests(self) -> int:
        if self.warm_up_requests is not None:
            return self.warm_up_requests
        return self.requests // self.traffic.warm_up_share

    def source(self, seed: int) -> TraceSource:
        """The source for a seed: 1, 2, … of a generator; of a file its first, second, … window."""
        cap = PAPER_CAPS.get(self.preset.partition(":")[0]) if self.traffic.capped else None
        if self.traffic.is_file:
            return TraceSource(self.traffic.source, self.requests, cap, start=(seed - 1) * self.requests)
        return TraceSource(self.traffic.source, self.requests, cap, seed=seed)

    def seeds(self, wanted: int) -> tuple[int, ...]:
        """The seeds, as many as wanted; of a file as many as it has whole windows, which do not overlap.

        Raises:
            TraceError: the trace is broken, or shorter than one window.
        """
        if not self.traffic.is_file:
            self.source(1).load()
            return tuple(range(1, wanted + 1))
        length = len(TraceSource(self.traffic.source).load().requests)
        if length < self.requests:
            reason = f"has {length} requests, fewer than the {self.requests} of one window ({self.title})"
            raise TraceError(self.traffic.source, None, reason)
        return tuple(range(1, min(wanted, length // self.requests) + 1))

    def sustainable_per_s(self, seed: int) -> float:
        """The rate that the instances can sustain for all requests, see ``simulation.capacity.bounds``."""
        return _sustainable_per_s(self, seed)

    def bounds(self, seed: int, slo_s: float) -> Bounds:
        """The rates that no variant can pass."""
        trace = self.source(seed).load()
        return bounds_of(trace, self.engine, self.instances, slo_s, skip=self.skip_requests)


@lru_cache(maxsize=64)
def _sustainable_per_s(workload: Workload, seed: int) -> float:
    trace = workload.source(seed).load()
    return sustainable_rate(trace, workload.engine, workload.instances, share=1.0, skip=workload.skip_requests)
