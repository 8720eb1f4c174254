"""Command-line options that the simulation's commands share, and their meaning."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any, Literal

from dualmap.runtime.amounts import whole_amount
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.spelling import did_you_mean
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.placing.policies.registry import OPTIONS
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings, DecodeAutoscaleSettings, autoscale_of
from dualmap.scheduling.settings import OWN_POLICIES, POLICIES, PolicyName, SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, Role
from dualmap.scheduling.tenants.tenant import Tenant
from dualmap.simulation.calibrate.calibrated import find_engine, is_calibrated
from dualmap.simulation.engine.engine_types import EngineConfig
from dualmap.simulation.engine.presets import PRESETS_IN_WORDS, Preset, UnknownPresetError, find_preset
from dualmap.simulation.engine.settings import EngineSettings
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.roles import roles_for, roles_of
from dualmap.simulation.virtual_time.runs import default_workers
from dualmap.simulation.virtual_time.scenario import Dispatch, Scenario
from dualmap.simulation.workload.arrivals import TRACE_TIMES, Loop
from dualmap.simulation.workload.generators import DEFAULT_SEED, GENERATORS
from dualmap.simulation.workload.sources import TraceSource

DEFAULT_INSTANCES = 8


class OptionError(SimulationError):
    """An option's value cannot be used; the message names both."""


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("trace")
    names = ", ".join(GENERATORS)
    trace.add_argument(
        "--trace",
        default="conversation",
        help=f"Mooncake JSONL, Azure CSV, own recording, or a generator ({names}), also as zipf:skew=1.2,requests=500",
    )
    trace.add_argument("--requests", "--limit", type=int, metavar="N", help="only the first N (a generator makes N)")
    trace.add_argument("--max-input-tokens", type=whole_amount, metavar="TOKENS", help="cut longer prompts to this")
    trace.add_argument(
        "--block-tokens", type=whole_amount, metavar="TOKENS", help="block size of a JSONL that does not name it"
    )
    trace.add_argument("--seed", type=int, default=DEFAULT_SEED, help="seed of generated traces")


def add_tenant_arguments(parser: argparse.ArgumentParser) -> None:
    tenants = parser.add_argument_group("tenants")
    tenants.add_argument(
        "--tenant", action="append", dest="tenants", metavar="NAME=TRACE@RATE", default=[],
        help="a tenant, in the place of a trace; repeat for more: light=uncached:tokens=16000@0.5,"
        " heavy=conversation@2x@weight=2; a rate with an x is a multiple of what the fleet sustains of that trace",
    )  # fmt: skip


def add_loop_arguments(parser: argparse.ArgumentParser) -> None:
    loop = parser.add_argument_group("loop")
    loop.add_argument(
        "--concurrency", type=int, metavar="N",
        help="N clients that each ask again when their answer came, and think between the turns of a session (none: at"
        " the trace's times, turns of sessions a think time after the answer before)",
    )  # fmt: skip
    loop.add_argument("--open-loop", action="store_true", help="at the trace's own times, whether answers came or not")
    loop.add_argument("--seconds", type=float, metavar="S", help="send nothing after S seconds (none: the whole trace)")
    loop.add_argument(
        "--skip-s", type=float, default=0.0, metavar="S", help="leave what is sent in the first S seconds out"
    )


def loop_of(arguments: argparse.Namespace) -> Loop:
    """Raises OptionError."""
    _at_least("concurrency", arguments.concurrency, 1)
    if arguments.concurrency is not None and arguments.open_loop:
        raise OptionError("--concurrency and --open-loop exclude each other")
    seconds = inf if arguments.seconds is None else arguments.seconds
    if not seconds > 0:
        raise OptionError(f"--seconds must be above 0, found {arguments.seconds}")
    if not 0 <= arguments.skip_s < seconds:
        raise OptionError(f"--skip-s must be at least 0 and leave a part of --seconds, found {arguments.skip_s}")
    return Loop(arguments.concurrency, arguments.open_loop, seconds)


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    fleet = parser.add_argument_group("fleet")
    names = ", ".join(POLICIES)
    fleet.add_argument(
        "--policy", metavar="P[,P…]", help=f"policies to compare, or 'all': {names} (none: scheduling.policy)"
    )
    fleet.add_argument(
        "--policy-options", metavar="JSON",
        help='parameters of policies, as {"preble": {"decode_s_per_token": 0.03}} (none: scheduling.policy_options for'
        " scheduling.policy, and defaults for others): " + "; ".join(
            f"{name} has {', '.join(options.model_fields)}" for name, options in OPTIONS.items()
        ),
    )  # fmt: skip
    fleet.add_argument(
        "--lines", default="", metavar="CLASS",
        help="requests of this priority class are lines of batches: they begin where the others leave room, until the"
        " last of these has come; without others, as many as the fleet runs",
    )  # fmt: skip
    fleet.add_argument("--pool", metavar="NAME", help="the configured pool to simulate (none: the first)")
    fleet.add_argument(
        "--instances", type=int, metavar="N",
        help=f"so many instances, like the pool's in turn (none: the pool's, {DEFAULT_INSTANCES} if it names none)",
    )  # fmt: skip
    fleet.add_argument(
        "--roles", metavar="4P4D",
        help="prefill, decode and mixed instances, as 4P4D or 2P2D4M; the same shares of --instances",
    )  # fmt: skip
    fleet.add_argument("--move-roles", action="store_true", help="the leader gives instances to the side that starves")
    fleet.add_argument(
        "--preset",
        metavar="P[,P…]",
        help=f"engine models that the instances have in turn: {PRESETS_IN_WORDS}; or a file of dualmap calibrate (none:"
        " emulator.preset)",
    )
    fleet.add_argument("--slo-s", type=float, help="TTFT SLO in seconds (none: scheduling.slo_ttft_s)")
    fleet.add_argument(
        "--slo-tpot-ms", type=float, metavar="MS",
        help="SLO of the time per output token: requests count that keep both (none: that of the TTFT alone; size: "
        "100)",
    )  # fmt: skip
    fleet.add_argument(
        "--dispatch",
        choices=[dispatch.value for dispatch in Dispatch],
        help="hold requests in the fleet, or send them at once (none: hold them where they may be reordered or moved)",
    )
    fleet.add_argument(
        "--dispatch-window-tokens",
        type=whole_amount,
        help="dispatched, unprefilled tokens (none: the pool's instances')",
    )
    fleet.add_argument(
        "--autoscale", metavar="MIN:MAX", help="the fleet changes its size itself, from --instances on (none: from MIN)"
    )
    fleet.add_argument(
        "--autoscale-decode", metavar="MIN:MAX",
        help="bounds of the decode instances; those of --autoscale are of the prefill instances then, and --roles says"
        " what there is at the start (none: the least of both)",
    )  # fmt: skip
    fleet.add_argument("--start-s", type=float, metavar="S", help="time until a started instance is ready")
    fleet.add_argument(
        "--first-tokens-seen", type=float, default=1.0, metavar="SHARE",
        help="share of the streams whose first token is seen, as endpoint pickers may see some alone",
    )  # fmt: skip
    fleet.add_argument("--kv-events", action="store_true", help="instances report their prefix caches")
    fleet.add_argument("--skip", type=int, default=0, metavar="N", help="leave the first N requests out of the results")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--workers", type=int, default=default_workers(), metavar="N", help="runs at once")
    output.add_argument("--quiet", action="store_true", help="no progress bar")


@dataclass(frozen=True, slots=True)
class ConfiguredFleet:
    """The settings of a fleet that a simulated one uses."""

    scheduling: SchedulingSettings
    engine: EngineSettings
    pools: tuple[PoolSettings, ...] = (PoolSettings(),)
    late_requests: Literal["serve", "refuse"] = "serve"
    tenants: tuple[Tenant, ...] = ()
    """Those that share the fleet by their weights."""


@dataclass(kw_only=True, frozen=True, slots=True)
class FleetOptions:
    """The fleet of the options and the settings."""

    policies: tuple[PolicyName, ...]
    scheduling: SchedulingSettings
    policy_options: Mapping[str, Mapping[str, Any]]
    """Parameters by policy; a policy that is not named has its defaults."""
    engines: tuple[EngineConfig, ...]
    """At least one; the instances are of these kinds in turn."""
    fleet: tuple[InstanceSpec, ...]
    late_requests: Literal["serve", "refuse"]
    move_roles: bool
    dispatch: Dispatch | None
    skip_requests: int
    instances: int
    autoscale: Autoscale | None = None
    slo_tpot_s: float | None = None
    first_tokens_seen: float = 1.0
    loop: Loop = TRACE_TIMES
    skip_s: float = 0.0
    kv_events: bool = False

    @property
    def engine(self) -> EngineConfig:
        """The engine of all instances. Raises OptionError where there are several."""
        if len(self.engines) > 1:
            raise OptionError("--preset: the bounds of a fleet are known for instances of one kind alone")
        return self.engines[0]

    def scenario(self, policy: PolicyName) -> Scenario:
        return Scenario(
            scheduling=self.scheduling.model_copy(
                update={"policy": policy, "policy_options": dict(self.policy_options.get(policy, {}))}
            ),
            engine=self.engines[0],
            engines=self.engines if len(self.engines) > 1 else (),
            instances=self.instances,
            dispatch=self.dispatch,
            fleet=self.fleet,
            late_requests=self.late_requests,
            move_roles=self.move_roles,
            skip_requests=self.skip_requests,
            autoscale=self.autoscale,
            slo_tpot_s=self.slo_tpot_s,
            first_tokens_seen=self.first_tokens_seen,
            loop=self.loop,
            skip_s=self.skip_s,
            kv_events=self.kv_events,
        )


def trace_source(arguments: argparse.Namespace) -> TraceSource:
    """The trace that the options name; read once, so that a broken one is reported before anything runs."""
    for option in ("requests", "max_input_tokens", "block_tokens"):
        _at_least(option, getattr(arguments, option), 1)
    source = TraceSource(
        arguments.trace, arguments.requests, arguments.max_input_tokens, arguments.block_tokens, arguments.seed
    )
    source.load()
    return source


def fleet_options(arguments: argparse.Namespace, configured: ConfiguredFleet) -> FleetOptions:
    """Raises OptionError."""
    _at_least("instances", arguments.instances, 1)
    _at_least("dispatch_window_tokens", arguments.dispatch_window_tokens, 1)
    _at_least("skip", arguments.skip, 0)
    _above_0("slo_s", arguments.slo_s)
    if not 0 <= arguments.first_tokens_seen <= 1:
        raise OptionError(f"--first-tokens-seen must be a share from 0 to 1, found {arguments.first_tokens_seen}")
    scheduling = configured.scheduling
    if arguments.slo_s is not None:
        scheduling = scheduling.model_copy(update={"slo_ttft_s": arguments.slo_s})
    if arguments.lines and arguments.lines not in (names := [each.name for each in scheduling.classes]):
        known = ", ".join(names) or "none"
        raise OptionError(f"--lines names a priority class of scheduling.classes: {known}; found {arguments.lines!r}")
    engines = _engines(arguments.preset, configured.engine)
    autoscale = _autoscale(arguments)
    fleet, instances = _members(arguments, _pool(arguments.pool, configured.pools), engines, autoscale)
    if arguments.dispatch_window_tokens is not None:
        fleet = tuple(replace(spec, dispatch_window_tokens=arguments.dispatch_window_tokens) for spec in fleet)
    policies = (scheduling.policy,) if arguments.policy is None else policies_of(arguments.policy)
    return FleetOptions(
        policies=policies,
        scheduling=scheduling,
        policy_options=_policy_options(arguments.policy_options, scheduling, policies),
        engines=engines,
        fleet=fleet,
        late_requests=configured.late_requests,
        move_roles=arguments.move_roles,
        dispatch=None if arguments.dispatch is None else Dispatch(arguments.dispatch),
        skip_requests=arguments.skip,
        instances=instances,
        autoscale=autoscale,
        slo_tpot_s=slo_tpot_s_of(arguments),
        first_tokens_seen=arguments.first_tokens_seen,
        loop=replace(loop_of(arguments), lines=arguments.lines),
        skip_s=arguments.skip_s,
        kv_events=arguments.kv_events,
    )


def slo_tpot_s_of(arguments: argparse.Namespace) -> float | None:
    """The SLO of the time per output token; None: the options name none. Raises OptionError."""
    slo_tpot_ms: float | None = arguments.slo_tpot_ms
    _above_0("slo_tpot_ms", slo_tpot_ms)
    return None if slo_tpot_ms is None else slo_tpot_ms / 1000


def _autoscale(arguments: argparse.Namespace) -> Autoscale | None:
    if arguments.autoscale is None:
        if arguments.autoscale_decode is not None:
            raise OptionError("--autoscale-decode needs --autoscale, the bounds of the prefill instances")
        return None
    settings = _bounds("autoscale", arguments.autoscale)
    if arguments.autoscale_decode is not None:
        bounds = _bounds("autoscale_decode", arguments.autoscale_decode)
        decode = DecodeAutoscaleSettings(min_instances=bounds.min_instances, max_instances=bounds.max_instances)
        settings = settings.model_copy(update={"decode": decode})
    if arguments.start_s is not None:
        if not 0 < arguments.start_s < 3600:
            raise OptionError(f"--start-s must be seconds above 0 and below an hour, found {arguments.start_s}")
        settings = settings.model_copy(update={"start_s": arguments.start_s})
    return Autoscale(settings)


def _bounds(option: str, text: str) -> AutoscaleSettings:
    try:
        return autoscale_of(text)
    except ValueError as error:
        raise OptionError(f"{_flag(option)} {error}") from error


def _pool(name: str | None, pools: tuple[PoolSettings, ...]) -> PoolSettings:
    for pool in pools:
        if name in (None, pool.name):
            return pool
    raise OptionError(f"--pool: there is no pool {name!r}; known are {', '.join(pool.name for pool in pools)}")


def _members(
    arguments: argparse.Namespace, pool: PoolSettings, engines: Sequence[EngineConfig], autoscale: Autoscale | None
) -> tuple[tuple[InstanceSpec, ...], int]:
    """The instances that there may be, those of the start first; and how many these are. Raises OptionError,
    RolesError."""
    text, count = arguments.roles, arguments.instances
    if autoscale is None:
        if text is None:
            fleet = _fleet(pool, engines, count)
        else:
            fleet = _with_roles(pool, engines, roles_of(text) if count is None else roles_for(text, count))
        return fleet, len(fleet)
    bounds = autoscale.settings
    if bounds.decode is not None:
        return _with_elastic_roles(arguments, pool, engines, autoscale)
    if text is not None:
        raise OptionError("--roles needs --autoscale-decode beside --autoscale: each role has bounds of its own")
    begin = max(bounds.min_instances, min(bounds.max_instances, count or bounds.min_instances))
    return _fleet(pool, engines, bounds.max_instances), begin


def _with_roles(pool: PoolSettings, engines: Sequence[EngineConfig], roles: Sequence[Role]) -> tuple[InstanceSpec, ...]:
    """Instances like the pool's with these roles."""
    return tuple(replace(spec, role=role) for spec, role in zip(_fleet(pool, engines, len(roles)), roles, strict=True))


def _with_elastic_roles(
    arguments: argparse.Namespace, pool: PoolSettings, engines: Sequence[EngineConfig], autoscale: Autoscale
) -> tuple[tuple[InstanceSpec, ...], int]:
    """The members of a fleet whose roles have bounds each."""
    if arguments.instances is not None or arguments.move_roles:
        raise OptionError(
            "--autoscale-decode excludes --instances and --move-roles: --roles says what there is at first"
        )
    bounds = {Role.PREFILL: autoscale.settings, Role.DECODE: autoscale.settings.of_decode}
    begin = {role: each.min_instances for role, each in bounds.items() if each is not None}
    if arguments.roles is not None:
        begin = {role: roles_of(arguments.roles).count(role) for role in bounds}
        for role, each in bounds.items():
            if each is not None and not each.min_instances <= begin[role] <= each.max_instances:
                raise OptionError(f"--roles has {begin[role]} {role} instances, outside of {each.bounds}")
        if Role.MIXED in roles_of(arguments.roles):
            raise OptionError("--roles has mixed instances, which do not scale beside prefill and decode")
    spares = [role for role, each in bounds.items() if each for _ in range(each.max_instances - begin[role])]
    roles = [*(role for role, count in begin.items() for _ in range(count)), *spares]
    return _with_roles(pool, engines, roles), sum(begin.values())


def _fleet(pool: PoolSettings, engines: Sequence[EngineConfig], instances: int | None) -> tuple[InstanceSpec, ...]:
    """The pool's instances, or ``instances`` like them in turn; if it names none, as many as given with the engine's
    figures, as ``dualmap up`` would start them.

    An instance without a KV capacity would report its own, which here is the engine's.
    """
    specs = [
        one.spec() if "kv_capacity_tokens" in one.model_fields_set
        else replace(one.spec(), kv_capacity_tokens=engine.kv_capacity_tokens)
        for one, engine in zip(pool.instances, cycle(engines), strict=False)
    ]  # fmt: skip
    count = instances or len(specs) or DEFAULT_INSTANCES
    if specs and count <= len(specs):
        return tuple(specs[:count])
    alike = specs or [engine.instance_spec("i") for engine in engines]
    return tuple(
        replace(spec, instance_id=f"i{number:03d}") for number, spec in enumerate(islice(cycle(alike), count), 1)
    )


def policies_of(text: str) -> tuple[PolicyName, ...]:
    """The policies of a list by commas; 'all' are all. Raises OptionError."""
    if text == "all":
        return POLICIES
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES and name not in OWN_POLICIES:
            meant = did_you_mean(name, POLICIES) or f"; known are {', '.join(POLICIES)}"
            raise OptionError(f"unknown policy {name!r}{meant}")
    if not names:
        raise OptionError("--policy names no policy")
    return tuple(policy for policy in (*POLICIES, *sorted(OWN_POLICIES)) if policy in names)


def _policy_options(
    text: str | None, scheduling: SchedulingSettings, policies: Sequence[PolicyName]
) -> Mapping[str, Mapping[str, Any]]:
    """The parameters of the policies. Raises OptionError."""
    try:
        named = json.loads(text or "{}")
    except ValueError as error:
        raise OptionError(f"--policy-options is not JSON: {error}") from error
    if not isinstance(named, dict) or not all(isinstance(options, dict) for options in named.values()):
        raise OptionError('--policy-options must read {"POLICY": {"NAME": VALUE}}')
    if unknown := sorted(named.keys() - set(policies)):
        raise OptionError(f"--policy-options: {unknown[0]!r} is no policy that is simulated")
    found: dict[str, dict[str, Any]] = {scheduling.policy: scheduling.policy_options, **named}
    for policy in policies:
        update = {"policy": policy, "policy_options": found.get(policy, {})}
        try:
            build_policy(scheduling.model_copy(update=update))
        except ValueError as error:
            raise OptionError(str(error).replace("scheduling.policy_options", "--policy-options", 1)) from error
    return found


def rates_of(text: str | None) -> tuple[float | None, ...]:
    """Rates of a list by commas; (None,) without one: the trace's own times. Raises OptionError."""
    if text is None:
        return (None,)
    try:
        rates = [float(rate) for rate in text.split(",") if rate.strip()]
    except ValueError:
        raise OptionError(f"--rate needs numbers separated by commas, found {text!r}") from None
    if not rates or any(not 0 < rate < float("inf") for rate in rates):
        raise OptionError(f"--rate needs requests per second above 0, found {text!r}")
    return tuple(rates)


def presets_of(text: str | None) -> tuple[Preset, ...]:
    """The engines of a list by commas. Raises OptionError."""
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if not names:
        raise OptionError("--preset names no engine")
    try:
        return tuple(_said(find_engine(name)) for name in names)
    except UnknownPresetError as error:
        raise OptionError(str(error)) from error


def _engines(presets: str | None, engine: EngineSettings) -> tuple[EngineConfig, ...]:
    """The engines of a list by commas, at least one. Raises OptionError."""
    if presets is None:
        _said(find_preset(engine.preset))
        return (engine.engine_config(),)
    return tuple(_engine(name.strip(), engine) for name in presets.split(","))


def _engine(preset: str, engine: EngineSettings) -> EngineConfig:
    """The named preset's engine with the settings' own figures, or a measured engine as it is. Raises OptionError."""
    try:
        if is_calibrated(preset):
            return find_engine(preset).engine
        return engine.model_copy(update={"preset": _said(find_engine(preset)).name}).engine_config()
    except UnknownPresetError as error:
        raise OptionError(str(error)) from error


def _said(preset: Preset) -> Preset:
    """The preset, after it was said how good its figures are."""
    if preset.note:
        print(f"{preset.name}: {preset.note}.", file=sys.stderr)
    return preset


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _at_least(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise OptionError(f"{_flag(option)} must be at least {least}, found {value}")


def _above_0(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < inf:
        raise OptionError(f"{_flag(option)} must be more than 0, found {value}")


def exit_code(command: str, work: Callable[[], int]) -> int:
    """Run a command; an error becomes its message and its exit code."""
    try:
        return work()
    except SimulationError as error:
        print(f"dualmap {command}: {error}", file=sys.stderr)
        return error.exit_code


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there complete or not at all. Raises OptionError."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise OptionError(f"{path}: cannot be written: {error.strerror or error}") from error
