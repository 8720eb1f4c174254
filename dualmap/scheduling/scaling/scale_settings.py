"""Settings of the autoscaler of one pool."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

MARGIN = 0.1
START_PATIENCE = 4.0
"""Multiples of ``start_s`` after which a start counts as failed."""
WORKLOAD = r"^(deployment|statefulset|leaderworkerset)/[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"


class DecodeAutoscaleSettings(BaseModel):
    """Bounds on a pool's instances of role ``decode``; all other settings are those of its other instances."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_instances: int = Field(1, ge=0, description="decode instances at least; 0: none while the pool is idle")
    max_instances: int = Field(ge=1, description="decode instances at most")
    start_s: float | None = Field(
        None,
        gt=0,
        description="time from a decision until a started decode instance is ready, seconds (none: autoscale.start_s)",
    )
    workload: str | None = Field(
        None, pattern=WORKLOAD, description="workload of the decode instances, for actuator kubernetes"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> DecodeAutoscaleSettings:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances {self.min_instances} is above max_instances {self.max_instances}")
        return self


class AutoscaleSettings(BaseModel):
    """How many instances a pool may have, and what starts and stops them. Workers of a pool must agree on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_instances: int = Field(
        1, ge=0, description="instances at least; with 0, requests that find none wait while the first one starts"
    )
    max_instances: int = Field(ge=1, description="instances at most")
    margin: float = Field(
        MARGIN,
        ge=-1,
        le=2,
        description="instances beyond the load, per square root of it: with more of it more requests are on time, and"
        " instances serve for more hours",
    )
    actuator: Literal["standby", "webhook", "command", "kubernetes", "none"] = Field(
        "standby",
        description="what starts and stops instances: the pool's standby instances alone; beside them a webhook, a"
        " command, or the replicas of a workload of Kubernetes; none: the wanted number is published, and nothing is"
        " changed",
    )
    start_s: float = Field(
        30.0,
        gt=0,
        description="time from a decision until a started instance is ready, seconds; it fails after four times that",
    )
    idle_s: float = Field(
        300.0, gt=0, description="time without a request after which a pool with min_instances 0 has none, seconds"
    )
    max_waiting: int = Field(
        1000,
        ge=1,
        description="requests that each replica lets wait for the first instance of a pool with min_instances 0; one"
        " more gets 503",
    )
    webhook_url: str | None = Field(None, pattern=r"^https?://", description="receives each decision by POST")
    webhook_secret: SecretStr | None = Field(None, description="key of the signature (HMAC-SHA256) of each POST")
    command: tuple[str, ...] = Field((), description="program and arguments; gets each decision as JSON on its input")
    workload: str | None = Field(
        None,
        pattern=WORKLOAD,
        description="workload whose replicas actuator kubernetes sets, as deployment/NAME, statefulset/NAME or"
        " leaderworkerset/NAME; its pods are found by pools[].discovery, one instance for each replica",
    )
    decode: DecodeAutoscaleSettings | None = Field(
        None,
        description="bounds of the decode instances, which scale by themselves then; all above counts the others, which"
        " prefill (none: decode instances stay as many as they are)",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> AutoscaleSettings:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances {self.min_instances} is above max_instances {self.max_instances}")
        if self.actuator == "webhook" and (self.webhook_url is None or self.webhook_secret is None):
            raise ValueError("actuator webhook needs webhook_url and webhook_secret")
        if self.actuator == "command" and not self.command:
            raise ValueError("actuator command needs command, the program to run")
        if self.actuator == "kubernetes" and self.workload is None:
            raise ValueError("actuator kubernetes needs workload, as deployment/NAME")
        if self.actuator == "kubernetes" and self.decode is not None:
            if self.decode.workload is None:
                raise ValueError("actuator kubernetes needs decode.workload, as deployment/NAME")
            if self.decode.workload == self.workload:
                raise ValueError(f"workload and decode.workload are both {self.workload}: each role needs its own")
        return self

    @property
    def of_decode(self) -> AutoscaleSettings | None:
        """The settings of the decode instances, as if they were all of a pool; None where they do not scale."""
        if self.decode is None:
            return None
        own = {**self.decode.model_dump(exclude_none=True), "workload": self.decode.workload, "decode": None}
        return self.model_copy(update=own)

    @property
    def gives_up_s(self) -> float:
        """Time after which a start counts as failed, and requests wait for it no longer, in seconds of the engines."""
        return START_PATIENCE * self.start_s

    @property
    def removes_leaving(self) -> bool:
        """Whether an instance that has left is gone for good, rather than parked as a spare."""
        return self.actuator == "kubernetes"

    @property
    def leaves_in_order(self) -> bool:
        """Whether only the instance with the highest number can leave: the workload removes no other."""
        return self.removes_leaving and not str(self.workload).startswith("deployment/")

    @property
    def bounds(self) -> str:
        """``MIN:MAX``, as the command line has it."""
        return f"{self.min_instances}:{self.max_instances}"


def autoscale_of(text: str) -> AutoscaleSettings:
    """The settings that ``MIN:MAX`` names.

    Raises:
        ValueError: it is no such pair; the message says what is wrong.
    """
    low, colon, high = text.partition(":")
    if not colon or not low.isdecimal() or not high.isdecimal():
        raise ValueError(f"needs MIN:MAX, as 2:6, found {text!r}")
    least, most = int(low), int(high)
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"needs 0 <= MIN <= MAX and 1 <= MAX, found {text}")
    return AutoscaleSettings(min_instances=least, max_instances=most)
