"""The description of one simulated run: the fleet, its settings and how time passes. Plain data, to send to a
process."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from dualmap.scheduling.placing.decision import holds
from dualmap.scheduling.placing.policies import build_policy, queue_order_of
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, Role
from dualmap.scheduling.tenants.tenant import Tenant
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.errors import ScenarioError
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.roles import roles_for
from dualmap.simulation.virtual_time.router_queue import RouterQueueRule
from dualmap.simulation.workload.arrivals import TRACE_TIMES, Loop

if TYPE_CHECKING:
    from dualmap.simulation.virtual_time.routers import RoutersOf  # which know scenarios

# "No limit", as a number that sums of tokens and requests never reach.
UNLIMITED = 1 << 50


class Dispatch(StrEnum):
    """The place where requests wait for an instance that is busy."""

    HOLD = "hold"
    """Requests wait in the fleet, until the instance's dispatch window has room: they can still move."""
    DIRECT = "direct"
    """Requests wait in the instance's own queue: every request is sent at once, as routers without a held queue do."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A change of the number of ready instances to ``instances``, at a moment of the run.

    Growing adds empty instances; shrinking drains those with the highest ids: they finish what they have.
    """

    at_s: float
    instances: int


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """A slowdown of an instance from a moment of the run on: every step takes ``slowdown`` times as long as its
    engine's model says."""

    at_s: float
    instance_id: str
    slowdown: float


@dataclass(frozen=True, slots=True)
class EngineFault:
    """An engine dies at a moment of the run, and is back with an empty cache after a while."""

    at_s: float
    instance_id: str
    down_for_s: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run without its trace."""

    scheduling: SchedulingSettings
    engine: EngineConfig
    instances: int = 8
    dispatch: Dispatch | None = None
    """None: the policy's own form, see ``dispatch_of``."""
    dispatch_window_tokens: int = 4096
    _: KW_ONLY
    max_queued_requests: int = UNLIMITED
    """Held requests of one instance; one more is refused."""
    fleet: tuple[InstanceSpec, ...] = ()
    """The instances by number from 1, each with figures of its own; empty: all the same, as the engine and the limits
    above say, and called by ``instance_name``."""
    roles: str = ""
    """Roles of the instances, as ``simulation.virtual_time.roles`` reads them; empty: all mixed."""
    decode_first: bool = False
    """Whether the decode leg of a split request is sent first and asks for its prefill leg: layerwise connectors."""
    move_roles: bool = False
    """Whether the leader gives instances to the role that is starved, see ``scheduling.scaling.role_plan``."""
    tenants: tuple[Tenant, ...] = ()
    """The tenants that share the fleet by their weights; without any, nothing is shared."""
    late_requests: Literal["serve", "refuse"] = "serve"
    """Treatment of a request whose expected TTFT exceeds its SLO, as ``router.late_requests`` has it."""
    changes: tuple[FleetChange, ...] = ()
    autoscale: Autoscale | None = None
    """The fleet changes its size itself, from ``instances`` on."""
    speed_changes: tuple[SpeedChange, ...] = ()
    faults: tuple[EngineFault, ...] = ()
    slo_tpot_s: float | None = None
    """SLO of the time per output token. It counts in the results alone: scheduling knows that of the first token."""
    loop: Loop = TRACE_TIMES
    """The rule by which requests follow each other."""
    skip_requests: int = 0
    """Requests at the start that load the fleet but stay out of the results."""
    skip_s: float = 0.0
    """Time from the first request on whose requests stay out of the results, too."""
    idle_work: bool = True
    """Whether, by deadline, idle instances take what other queues would make late, where the policy does not rebalance.
    """
    rebalance_interval_s: float = 1.0
    rebalance_min_gap_s: float = 0.02
    rebalance_max_moves: int = 256
    hotness_interval_s: float = 1.0
    sample_interval_s: float = 1.0
    instance_name: str = "i{:03d}"
    """Names of instances, by number from 1: names decide their places on the rings."""
    output_limits_known: bool = False
    """Requests have a limit on their answer, and use it up: no longer answer is expected. Otherwise they have none."""
    first_tokens_seen: float = 1.0
    """Share of the requests whose first token is seen, evenly spread: a gateway may carry answers past its pickers. The
    first tokens of the others are presumed, and they end without a usage."""
    router_queue: RouterQueueRule | None = None
    """Another project's queue in the router, before an instance is chosen; None: there is none."""
    pauses_programs: bool = False
    """Whether another project's rule pauses and resumes whole runs, see ``simulation.virtual_time.program_pauses``."""
    pulls: bool = False
    """Instances pull from each other's caches, where that costs less (``scheduling.estimates.pulls``)."""
    endless_cache: bool = False
    """Every instance finds all that any of them has computed, see ``simulation.engine.endless_kv_pool``: a bound, not a
    fleet. The scheduling code knows nothing of it."""
    kv_events: bool = False
    """Instances report what their prefix caches do, and the store follows it; otherwise it estimates."""
    engines: tuple[EngineConfig, ...] = ()
    """Engines of a fleet of several kinds, which the instances have in turn. Empty: all are as ``engine`` is."""
    routers: RoutersOf | None = None
    """Makes router replicas that share no store; None: they share one, so their number changes nothing."""

    def __post_init__(self) -> None:
        """Raises ScenarioError."""
        alone = {
            "roles": bool(self.roles) or any(spec.role is not Role.MIXED for spec in self.fleet),
            "autoscale": self.autoscale is not None,
            "tenants": bool(self.tenants),
            "router_queue": self.router_queue is not None,
            "admit_runs": self.scheduling.admit_runs,
            "pauses_programs": self.pauses_programs,
        }
        if self.routers is not None and (found := [name for name, is_there in alone.items() if is_there]):
            raise ScenarioError(f"{' and '.join(found)}: only where router replicas share a store")
        waits = {
            "admit_runs": self.scheduling.admit_runs,
            "router_queue": self.router_queue is not None,
            "pauses_programs": self.pauses_programs,
        }
        if len(found := [name for name, is_there in waits.items() if is_there]) > 1:
            raise ScenarioError(f"{' and '.join(found)}: one of the two decides when a request is placed")

    @property
    def dispatch_of(self) -> Dispatch:
        """How this run dispatches: as a live fleet does, unless it says otherwise."""
        if self.dispatch is not None:
            return self.dispatch
        held = holds(build_policy(self.scheduling), queue_order_of(self.scheduling))
        return Dispatch.HOLD if held else Dispatch.DIRECT

    @property
    def refuses_late(self) -> bool:
        return self.late_requests == "refuse"

    def spec(self, index: int) -> InstanceSpec:
        """The description of an instance, by number from 0. Raises RolesError."""
        spec = self.fleet[index] if self.fleet else self._made_up_spec(index)
        if self.dispatch_of is Dispatch.DIRECT:
            return replace(spec, max_running_requests=UNLIMITED)
        return spec

    def engine_of(self, index: int) -> EngineConfig:
        """The engine of an instance, by number from 0."""
        return self.engines[index % len(self.engines)] if self.engines else self.engine

    def _made_up_spec(self, index: int) -> InstanceSpec:
        roles = roles_for(self.roles, self.instances) if self.roles else (Role.MIXED,)
        return replace(
            self.engine_of(index).instance_spec(self.instance_name.format(index + 1)),
            role=roles[index % len(roles)],
            dispatch_window_tokens=self.dispatch_window_tokens,
            max_queued_requests=self.max_queued_requests,
        )

    def slowed(self, factor: float) -> Scenario:
        """The scenario with engines whose steps take so many times as long."""
        engine, *engines = [replace(each, costs=each.costs.slowed(factor)) for each in (self.engine, *self.engines)]
        return replace(self, engine=engine, engines=tuple(engines))

    def in_blocks_of(self, block_tokens: int) -> Scenario:
        """The scenario with a trace's block size everywhere: the trace has its prefixes in these blocks."""
        engine, *engines = [replace(each, block_tokens=block_tokens) for each in (self.engine, *self.engines)]
        scheduling = self.scheduling.model_copy(update={"block_tokens": block_tokens})
        return replace(self, engine=engine, engines=tuple(engines), scheduling=scheduling)
