"""Settings of the scheduling core."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_serializer,
    field_validator,
    model_validator,
)

from dualmap.scheduling.removed_settings import removed

PolicyName = Literal[
    "dualmap",
    "dualmap-least-cost",
    "dualmap-cache-affinity",
    "dualmap-least-loaded",
    "dualmap-min-ttft",
    "dualmap-no-rebalance",
    "round-robin",
    "least-loaded",
    "cache-affinity",
    "min-ttft",
    "preble",
    "dynamo",
    "vllm-kv-aware",
    "sglang",
    "llm-d",
    "llm-d-latency",
]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
MAX_SLO_S = 3600.0
"""Deadlines are whole milliseconds, which the store's scripts add to the time."""
DECODE_STALL_S = 3.0
"""The paper's T, in seconds of the engine, as the next two are."""
HOTNESS_WINDOW_S = 120.0
KV_WEIGHT_S = 4.0
"""Measured, with the weights of the default policy (``docs/concepts/default-policy.md``)."""
Order = Literal["fifo", "deadline"]
"""Order of held requests: which one is granted first."""
OWN_POLICIES: set[Any] = set()
"""Names of policies of other packages, see ``scheduling.placing.policies.registry.add_policy``."""


class SplitSettings(BaseModel):
    """How requests are split where a pool has prefill or decode instances."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["auto", "always", "never"] = Field(
        "auto", description="whether requests are split into a prefill and a decode leg; auto: where that costs less"
    )
    slo_tpot_s: float = Field(
        0.05,
        gt=0,
        description="target time per output token, seconds: roles move, and prompts are split, so that answers keep it",
    )


class PriorityClassSettings(BaseModel):
    """One priority class."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="name of the class")
    floor: float = Field(
        0.0, ge=0, le=1, description="part of the fleet's prefill that its waiting requests get in any case"
    )
    fills_idle: bool = Field(
        False, description="dispatched only where nothing of another class wants to be prefilled and memory is left"
    )
    evictable: bool = Field(
        False,
        description="answers of the class that are under way go on elsewhere or later where a request of a higher class"
        " would miss its SLO",
    )
    slo_ttft_s: float | None = Field(
        None, gt=0, le=MAX_SLO_S, description="target time to first token, seconds (none: that of all requests)"
    )
    service_tiers: tuple[str, ...] = Field((), description="values of OpenAI's service_tier that ask for the class")
    engine_priority: int = Field(0, description="priority that engines are told, the lower the sooner")


class SchedulingSettings(BaseModel):
    """How requests are placed. Replicas, workers and the simulator of one pool must agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyName = Field("dualmap-least-cost", description="scheduling policy, or that of an installed package")
    policy_options: dict[str, Any] = Field(
        {}, description="parameters of the policy by name, for policies that have some; the policy checks them"
    )
    slo_ttft_s: float = Field(5.0, gt=0, le=MAX_SLO_S, description="target time to first token, seconds")
    slo_ttft_s_per_1k_tokens: float = Field(
        0.0, ge=0, description="added to slo_ttft_s for each 1,000 tokens of the prompt, seconds"
    )
    slo_ttft_max_s: float = Field(
        60.0,
        gt=0,
        le=MAX_SLO_S,
        description="upper bound of the target that grows with the prompt, seconds; slo_ttft_s at least",
    )
    block_tokens: int = Field(128, ge=1, le=4096, description="tokens in one prompt block")
    queue_order: Literal["auto", "fifo", "deadline"] = Field(
        "auto",
        description="which held request is granted first; auto: the order that the policy is made for (deadline:"
        " dualmap-least-cost; fifo: the other built-in ones)",
    )
    max_hold_s: float = Field(3600.0, gt=0, description="longest time a request is held, seconds; then it is refused")
    max_deferred_s: float | None = Field(
        None,
        ge=0,
        description="longest time that a deferred request is held past its deadline, seconds; then it is refused (none:"
        " it waits as long as its client does, up to max_hold_s)",
    )
    admit_runs: bool = Field(
        False,
        description="agents' runs wait between two turns while the contexts of active runs fill the KV memory of the"
        " instances",
    )
    classes: tuple[PriorityClassSettings, ...] = Field(
        (), max_length=8, description="priority classes of requests, the highest first (none: all are equal)"
    )
    engine_priorities: bool = Field(
        False, description="engines schedule by priority (--scheduling-policy priority), and are told that of the class"
    )
    split: SplitSettings = Field(default_factory=SplitSettings, description="prefill and decode on different instances")
    time_scale: float = Field(
        1.0,
        gt=0,
        description="engine seconds in one second of the clock, for emulated instances: what takes engine time is"
        " expected so much sooner, and background jobs run so much more often",
    )

    @field_validator("policy", mode="wrap")
    @classmethod
    def _own_policies_too(cls, name: Any, among_ours: ValidatorFunctionWrapHandler) -> Any:
        return name if isinstance(name, str) and name in OWN_POLICIES else among_ours(name)

    @field_validator("policy_options")
    @classmethod
    def _options_are_in_order(cls, options: dict[str, Any]) -> dict[str, Any]:
        return dict(sorted(options.items()))  # the same ones have one fingerprint

    @field_serializer("policy")
    def _policy_as_it_is(self, name: str) -> str:
        return name

    @model_validator(mode="after")
    def _classes_are_in_order(self) -> Self:
        names = [each.name for each in self.classes]
        if len(set(names)) < len(names):
            raise ValueError(f"two classes have one name: {', '.join(names)}")
        fills = [each.fills_idle for each in self.classes]
        if fills != sorted(fills) or (fills and fills[0]):
            raise ValueError("classes that fill idle room come last, behind at least one that does not")
        if sum(each.floor for each in self.classes) > 1:
            raise ValueError("the floors of all classes together are more than 1")
        return self

    @property
    def decode_stall_s(self) -> float:
        """Time without a finished prefill that counts as a decode bottleneck, seconds of the clock."""
        return DECODE_STALL_S / self.time_scale

    @property
    def hotness_window_s(self) -> float:
        """The sliding window of the hotness tree, seconds of the clock."""
        return HOTNESS_WINDOW_S / self.time_scale

    @property
    def kv_weight_s(self) -> float:
        """Cost of a KV memory's worth of running context, in seconds of prefill work by the clock: in policy
        ``dualmap-least-cost``, for decode legs, and in the store's ranking of the least loaded."""
        return KV_WEIGHT_S / self.time_scale

    def __hash__(self) -> int:
        return int(self.fingerprint, 16)

    @property
    def fingerprint(self) -> str:
        """Eight hex digits, the same for the same settings, which all processes of a fleet must have."""
        return xxhash.xxh32_hexdigest(self.model_dump_json().encode())


FIXED_AT_START = frozenset({"block_tokens", "time_scale"})
"""Settings that the kept state depends on, or that the store's scripts have as constants: they change with a restart of
the whole fleet alone."""


OPTIONS = "policy_options"
"""The setting whose entries are the policy's own: ``policy_options.NAME``."""


def no_such_setting(name: str) -> str:
    """The complaint about a dotted name that is no setting."""
    if answer := removed(f"scheduling.{name}"):
        return f"scheduling.{name}: {answer}"
    close = difflib.get_close_matches(name, setting_names(SchedulingSettings().model_dump()), n=1)
    return f"there is no setting scheduling.{name}" + (f"; did you mean {close[0]}?" if close else "")


def is_setting(name: str) -> bool:
    """Whether this is the dotted name of a setting, without ``scheduling.``."""
    return name.startswith(f"{OPTIONS}.") or name in setting_names(SchedulingSettings().model_dump())


def setting_names(fields: Mapping[str, Any], before: str = "") -> list[str]:
    """The dotted names of these settings, those of their sections included."""
    return [
        name
        for field, value in fields.items()
        for name in (setting_names(value, f"{before}{field}.") if _is_section(field, value) else [f"{before}{field}"])
    ]


def _is_section(field: str, value: Any) -> bool:
    return isinstance(value, dict) and field != OPTIONS


def with_setting(fields: dict[str, Any], name: str, given: Any) -> bool:
    """Put a value in its place among dumped settings, by dotted name; False where no setting has the name."""
    *sections, last = name.split(".")
    if sections == [OPTIONS]:
        fields[OPTIONS] = {**fields[OPTIONS], last: given} if isinstance(fields[OPTIONS], Mapping) else {last: given}
        return True
    section: Any = fields
    for part in sections:
        section = section.get(part) if isinstance(section, dict) else None
    if not isinstance(section, dict) or last not in section or _is_section(last, section[last]):
        return False
    section[last] = given
    return True


def with_overrides(settings: SchedulingSettings, overrides: Mapping[str, Any]) -> SchedulingSettings:
    """The settings with some of them changed in the running fleet, by dotted name (``split.mode``).

    The configured options belong to the configured policy: another policy begins without options.

    Raises:
        ValueError: a name is unknown or fixed at the start, or a value is wrong; the message names it.
    """
    if not overrides:
        return settings
    fields = settings.model_dump()
    if overrides.get("policy", settings.policy) != settings.policy:
        fields[OPTIONS] = {}
    for name, given in sorted(overrides.items()):  # the options as a whole before single ones
        if name in FIXED_AT_START:
            raise ValueError(f"scheduling.{name} cannot change while the fleet runs: restart it with another value")
        if not with_setting(fields, name, given):
            raise ValueError(no_such_setting(name))
    try:
        return SchedulingSettings.model_validate(fields)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"scheduling.{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
