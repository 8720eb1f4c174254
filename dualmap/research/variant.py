"""Variants: a policy and settings under a name of one's own, as written on a command line.

``NAME=POLICY,setting=value,…``, for example ``ours=dualmap-least-cost,policy_options.deferred_weight=0.1``.
A setting is one of the scheduling section (dots lead into its parts, and to the policy's own parameters) or one of
SCENARIO_OPTIONS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dualmap.research.scalers import Scaler
from dualmap.research.unshared.load_view import LoadView
from dualmap.research.unshared.routers import UnsharedRouters
from dualmap.research.workload import Workload
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.removed_settings import removed
from dualmap.scheduling.scaling.scale_settings import AutoscaleSettings, autoscale_of
from dualmap.scheduling.settings import (
    OPTIONS,
    OWN_POLICIES,
    POLICIES,
    SchedulingSettings,
    setting_names,
    with_setting,
)
from dualmap.simulation.errors import SimulationError
from dualmap.simulation.virtual_time.autoscale import Autoscale
from dualmap.simulation.virtual_time.roles import roles_of
from dualmap.simulation.virtual_time.router_queue import RouterQueueRule
from dualmap.simulation.virtual_time.scenario import Dispatch, Scenario, SpeedChange

SLOWDOWN = 2.0
"""The factor by which slow instances of a fleet are slower."""


class VariantError(SimulationError):
    """A variant cannot be understood; the message names it and the part of it."""


class ScenarioOptions(BaseModel):
    """Options of a variant in addition to the scheduling settings; None: the scenario's own default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dispatch: Dispatch | None = None
    dispatch_window_tokens: int | None = Field(None, ge=1)
    max_queued_requests: int | None = Field(None, ge=0)
    rebalance_interval_s: float | None = Field(None, gt=0)
    late_requests: Literal["serve", "refuse"] | None = None
    router_queue: RouterQueueRule | None = None
    pauses_programs: bool | None = None
    endless_cache: bool | None = None
    kv_events: bool | None = None
    replicas: int | None = Field(None, ge=1)
    load_view: LoadView | None = None
    """The view of the load that each of ``replicas`` has, which share no store; None: they share one."""
    reading_interval_s: float | None = Field(None, gt=0)
    roles: str | None = None
    slow: Literal["half", "one"] | None = None
    """Instances that are half as fast as their engine's model says, from the start: every second one, or the first."""
    autoscale: AutoscaleSettings | None = None
    """The fleet sizes itself; on a command line MIN:MAX."""
    scaler: str | None = None
    """The plan that decides the size, as ``research.scalers`` reads it; None: the fleet's own."""

    @field_validator("roles")
    @classmethod
    def _roles_can_be_read(cls, roles: str | None) -> str | None:
        if roles is not None:
            roles_of(roles)
        return roles

    @field_validator("autoscale", mode="before")
    @classmethod
    def _bounds_can_be_read(cls, autoscale: Any) -> Any:
        return autoscale_of(autoscale) if isinstance(autoscale, str) else autoscale

    @field_validator("scaler")
    @classmethod
    def _scaler_is_known(cls, scaler: str | None) -> str | None:
        if scaler is not None:
            Scaler.parse(scaler)
        return scaler

    @model_validator(mode="after")
    def _options_have_a_meaning(self) -> ScenarioOptions:
        if self.load_view is None and (self.replicas is not None or self.reading_interval_s is not None):
            raise ValueError("replicas and reading_interval_s need a load_view: with one store they change nothing")
        if self.autoscale is None and self.scaler is not None:
            raise ValueError("a scaler needs autoscale, the bounds of the fleet")
        return self

    def routers(self) -> UnsharedRouters | None:
        """The replicas that share no store, if there are such."""
        if self.load_view is None:
            return None
        return UnsharedRouters(self.replicas or 1, self.load_view, self.reading_interval_s or 1.0)

    def elastic(self) -> Autoscale | None:
        """How the fleet sizes itself, if it does."""
        if self.autoscale is None:
            return None
        return Autoscale(self.autoscale, None if self.scaler is None else Scaler.parse(self.scaler))


SCENARIO_OPTIONS = tuple(ScenarioOptions.model_fields)
_MADE = frozenset({"slow", "replicas", "load_view", "reading_interval_s", "autoscale", "scaler"})
"""Options that are no fields of a scenario: parts of it are made from them."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One competitor."""

    name: str
    scheduling: SchedulingSettings
    options: ScenarioOptions = field(default_factory=ScenarioOptions)

    def scenario(self, workload: Workload) -> Scenario:
        """The variant over a workload's fleet; an SLO of the traffic's own goes before the variant's."""
        scheduling, slo_s = self.scheduling, workload.traffic.slo_ttft_s
        if slo_s is not None:
            scheduling = scheduling.model_copy(update={"slo_ttft_s": slo_s})
        own = {name: value for name, value in self.options if value is not None and name not in _MADE}
        scenario = Scenario(
            scheduling=scheduling,
            engine=workload.engine,
            instances=workload.instances,
            changes=workload.changes,
            skip_requests=workload.skip_requests,
            slo_tpot_s=workload.traffic.slo_tpot_s,
            routers=self.options.routers(),
            autoscale=self.options.elastic(),
            **own,
        )
        return replace(scenario, speed_changes=self._slow_from_the_start(scenario))

    def _slow_from_the_start(self, scenario: Scenario) -> tuple[SpeedChange, ...]:
        if self.options.slow is None:
            return ()
        numbers = range(0, scenario.instances, 2) if self.options.slow == "half" else (0,)
        return tuple(SpeedChange(0.0, scenario.spec(number).instance_id, SLOWDOWN) for number in numbers)


def parse_variant(text: str, base: SchedulingSettings) -> Variant:
    """The variant that ``text`` describes, over the settings of ``base``.

    Raises:
        VariantError: no name, an unknown policy or setting, or a value that the setting does not take.
    """
    head, *pairs = [part.strip() for part in text.split(",")]
    name, _, policy = (part.strip() for part in head.partition("="))
    if not name or not policy:
        raise VariantError(f"variant {text!r} must read NAME=POLICY,setting=value,…")
    settings: dict[str, object] = {}
    for pair in filter(None, pairs):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise VariantError(f"variant {name!r}: {pair!r} must read setting=value")
        settings[key] = value
    return _variant(name, policy, settings, base)


def _variant(name: str, policy: object, settings: Mapping[str, object], base: SchedulingSettings) -> Variant:
    if policy not in POLICIES and policy not in OWN_POLICIES:
        raise VariantError(f"variant {name!r}: unknown policy {policy!r}; known are {', '.join(POLICIES)}")
    scheduling: dict[str, Any] = base.model_dump() | {"policy": policy}
    if policy != base.policy:
        scheduling[OPTIONS] = {}
    options: dict[str, object] = {}
    for key, value in settings.items():
        if key in SCENARIO_OPTIONS:
            options[key] = value
        else:
            _set(scheduling, key, _option(value) if key.startswith(f"{OPTIONS}.") else value, name)
    try:
        variant = Variant(name, SchedulingSettings.model_validate(scheduling), ScenarioOptions.model_validate(options))
        build_policy(variant.scheduling)
    except ValidationError as error:
        raise VariantError(f"variant {name!r}: {first_reason(error)}") from error
    except ValueError as error:
        raise VariantError(f"variant {name!r}: {error}") from error
    return variant


def _option(value: object) -> object:
    """A policy's own parameter. A text that reads as a number is one: nothing else says what it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _set(settings: dict[str, Any], key: str, value: object, variant: str) -> None:
    if not with_setting(settings, key, value):
        known = removed(f"scheduling.{key}") or f"known are {', '.join((*SCENARIO_OPTIONS, *SETTINGS))}"
        raise VariantError(f"variant {variant!r}: unknown setting {key!r}; {known}")


def first_reason(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(step) for step in first["loc"])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


SETTINGS = tuple(setting_names(SchedulingSettings().model_dump()))
"""Every scheduling setting by its path."""


def described(variant: Variant) -> Mapping[str, object]:
    """The differences of the variant from the defaults, for reports."""
    own = _differences(variant.scheduling.model_dump(mode="json"), SchedulingSettings().model_dump(mode="json"))
    return MappingProxyType(
        {"policy": variant.scheduling.policy, **own, **variant.options.model_dump(mode="json", exclude_none=True)}
    )


def described_variant(name: str, description: Mapping[str, object]) -> Variant:
    """The variant of a description by ``described``.

    Raises:
        VariantError: a policy or setting that this version has not.
    """
    settings = {key: value for key, value in description.items() if key != "policy"}
    return _variant(name, description.get("policy"), settings, SchedulingSettings())


def _differences(settings: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            found |= _differences(value, defaults[key], f"{prefix}{key}.")
        elif value != defaults.get(key):
            found[prefix + key] = value
    return found
