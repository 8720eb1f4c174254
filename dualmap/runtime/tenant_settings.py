"""Settings of tenants: who they are, how they are known, and what they may use."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from dualmap.scheduling.state.registered_adapters import LONGEST_PATH, is_folder, normal_path
from dualmap.scheduling.tenants.budgets import Limit, Measure, Period
from dualmap.scheduling.tenants.tenant import Tenant


def folder(path: str) -> str:
    """The plain spelling of an absolute path. Raises ValueError for any other."""
    plain = normal_path(path)
    if not is_folder(plain) or plain == "/":
        raise ValueError("must be the absolute path of a folder, as engines see it")
    return plain


NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
NAME_IN_WORDS = (
    "letters, digits, '_', '-' and '.', begins with a letter or a digit, and is no longer than 64 characters"
)
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
ModelName = Annotated[str, Field(max_length=4096)]
AdapterFolder = Annotated[str, Field(max_length=LONGEST_PATH), AfterValidator(folder)]
Amount = Annotated[int, Field(ge=1, lt=2**53)]
SHORTEST_KEY = 8


class LimitSettings(BaseModel):
    """How much may be used over the whole fleet. What is left out is not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Amount | None = Field(None, description="requests a minute")
    tokens_per_minute: Amount | None = Field(None, description="tokens of prompts and answers a minute")
    prompt_tokens_per_minute: Amount | None = Field(None, description="tokens of prompts a minute")
    output_tokens_per_minute: Amount | None = Field(None, description="tokens of answers a minute")
    requests_per_day: Amount | None = Field(None, description="quota: requests until midnight UTC")
    tokens_per_day: Amount | None = Field(None, description="quota: tokens of prompts and answers until midnight UTC")
    tokens_per_month: Amount | None = Field(None, description="quota: tokens of prompts and answers, by calendar month")
    requests_in_flight: Amount | None = Field(None, description="requests at a time, held and parked ones among them")
    tokens_in_flight: Amount | None = Field(
        None, description="tokens of prompts and expected answers of the requests at a time"
    )

    def limits(self, of: str = "") -> tuple[Limit, ...]:
        """The limits for what ``of`` names, see ``Limit``."""
        return tuple(
            Limit(measure, period, amount, of)
            for name, measure, period in _LIMITS
            if (amount := getattr(self, name)) is not None
        )


_LIMITS = (
    ("requests_per_minute", Measure.REQUESTS, Period.MINUTE),
    ("tokens_per_minute", Measure.TOKENS, Period.MINUTE),
    ("prompt_tokens_per_minute", Measure.PROMPT_TOKENS, Period.MINUTE),
    ("output_tokens_per_minute", Measure.OUTPUT_TOKENS, Period.MINUTE),
    ("requests_per_day", Measure.REQUESTS, Period.DAY),
    ("tokens_per_day", Measure.TOKENS, Period.DAY),
    ("tokens_per_month", Measure.TOKENS, Period.MONTH),
    ("requests_in_flight", Measure.REQUESTS, Period.IN_FLIGHT),
    ("tokens_in_flight", Measure.TOKENS, Period.IN_FLIGHT),
)


def limit_name(limit: Limit) -> str:
    """The name of a limit in the settings."""
    return next(name for name, *kind in _LIMITS if kind == [limit.measure, limit.period])


class TenantKeySettings(BaseModel):
    """One key of a tenant: itself, or its hash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name = Field(description="name of the key in logs and limits; never the key itself")
    key: SecretStr | None = Field(None, description="the key, at least 8 characters without blanks")
    sha256: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal, in place of the key"
    )
    limits: LimitSettings = Field(LimitSettings(), description="limits of this key alone, within those of the tenant")

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"key {self.name!r} needs either key or sha256")
        if self.key is not None:
            text = self.key.get_secret_value()
            if len(text) < SHORTEST_KEY or text != "".join(text.split()):
                raise ValueError(f"key {self.name!r} must have {SHORTEST_KEY} characters or more, and no blanks")
        return self

    @property
    def hash(self) -> str:
        """SHA-256 of the key, in hexadecimal."""
        if self.key is None:
            return self.sha256 or ""
        return hashlib.sha256(self.key.get_secret_value().encode()).hexdigest()


class TenantFields(BaseModel):
    """The fields of every tenant, wherever it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limits: LimitSettings = Field(LimitSettings(), description="limits of all that it sends")
    model_limits: dict[ModelName, LimitSettings] = Field(
        {}, description="limits for single models: each holds for the name that is sent and for the model it stands for"
    )
    models: tuple[str, ...] = Field((), description="models, aliases and LoRA names that it may use; empty: all")
    pools: tuple[str, ...] = Field((), description="pools that it may use; empty: all")
    adapter_paths: tuple[AdapterFolder, ...] = Field(
        (),
        description="folders on the engines' hosts from which it may load LoRA adapters of its own; empty: none",
    )
    max_adapters: int = Field(16, ge=0, le=2000, description="LoRA adapters that it may have registered in each pool")
    priority_class: Name | None = Field(None, description="the highest priority class of its requests (none: no class)")
    weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="share of the work, relative to the weights of other tenants"
    )
    shares_cache: bool = Field(
        False, description="share the KV caches of those without a tenant, whatever router.tenant_cache_secret says"
    )

    draws: Literal["expected", "asked"] = Field(
        "expected",
        description="what a request takes of limits on tokens until it is over: the tokens that its answers are"
        " `expected` to have, or all that are `asked` for (`max_tokens` times the answers), so that no answer exceeds a"
        " limit",
    )

    def tenant_named(self, name: str, limits_of_keys: Mapping[str, LimitSettings]) -> Tenant:
        """The tenant as requests are judged by it."""
        limits = self.limits.limits()
        for key, settings in limits_of_keys.items():
            limits += settings.limits(f"key:{key}")
        for model, settings in self.model_limits.items():
            limits += settings.limits(f"model:{model}")
        return Tenant(
            name,
            limits,
            frozenset(self.models),
            frozenset(self.pools),
            self.priority_class or "",
            self.weight,
            shares_cache=self.shares_cache,
            adapter_paths=self.adapter_paths,
            max_adapters=self.max_adapters,
            draws_asked=self.draws == "asked",
        )


class TenantSettings(TenantFields):
    """One tenant of the settings."""

    name: Name = Field(description="name of the tenant: letters, digits, '_', '-' and '.'")
    keys: tuple[TenantKeySettings, ...] = Field((), description="keys that its clients send, as they send API keys")

    @model_validator(mode="after")
    def _keys_are_unique(self) -> Self:
        names = [key.name for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError(f"two keys of tenant {self.name!r} have one name")
        return self

    def tenant(self) -> Tenant:
        """The tenant as requests are judged by it."""
        return self.tenant_named(self.name, {key.name: key.limits for key in self.keys})
