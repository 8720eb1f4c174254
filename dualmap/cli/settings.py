"""The settings tree: every package's own section under one name."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dualmap.router.picker.settings import PickerSettings
from dualmap.router.settings import RouterSettings, not_finite
from dualmap.runtime.pool_settings import PoolSettings, UpstreamSettings
from dualmap.runtime.tenant_settings import TenantSettings
from dualmap.scheduling.placing.policies import build_policy
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.emulator.settings import EmulatorSettings
from dualmap.statestore.settings import StoreSettings
from dualmap.workers.settings import WorkerSettings


class Settings(BaseModel):
    """Everything that can be configured. The same names serve as flags, environment variables and YAML."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheduling: SchedulingSettings = Field(SchedulingSettings(), description="how requests are placed")
    store: StoreSettings = Field(StoreSettings(), description="where the shared state lives")
    pools: tuple[PoolSettings, ...] = Field(
        (PoolSettings(),), min_length=1, description="the models served, and the instances that serve them"
    )

    tenants: tuple[TenantSettings, ...] = Field((), description="teams that share the fleet, their keys and limits")

    upstream: UpstreamSettings = Field(UpstreamSettings(), description="TLS of routers and workers towards instances")

    router: RouterSettings = Field(RouterSettings(), description="one router replica")
    picker: PickerSettings = Field(PickerSettings(), description="one endpoint picker, beside the router section")
    worker: WorkerSettings = Field(WorkerSettings(), description="one background worker")
    emulator: EmulatorSettings = Field(EmulatorSettings(), description="emulated vLLM instances")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Settings:
        pools = [pool.name for pool in self.pools]
        models = [name for pool in self.pools for name in {pool.model, *pool.aliases, *pool.loras}]
        for what, names in (("pool name", pools), ("model name", models)):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"{what} {twice[0]!r} is used by two pools")
        for pool in self.pools:
            both = {pool.model, *pool.aliases} & set(pool.loras)
            if both:
                raise ValueError(
                    f"{min(both)!r} of pool {pool.name!r} names both its model and a LoRA adapter: rename the adapter"
                )
            if pool.fallback is not None and (pool.fallback == pool.name or pool.fallback not in pools):
                raise ValueError(f"the fallback {pool.fallback!r} of pool {pool.name!r} is no other pool")
            ids = Counter(instance.id for instance in pool.instances)
            twice = [name for name, count in ids.items() if count > 1]
            if twice:
                raise ValueError(f"instance id {twice[0]!r} appears twice in pool {pool.name!r}")
        return self

    @model_validator(mode="after")
    def _tenants_are_distinct(self) -> Settings:
        for what, names in (
            ("tenant", [tenant.name for tenant in self.tenants]),
            ("key", [key.hash for tenant in self.tenants for key in tenant.keys]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(
                    f"two tenants are named {twice[0]!r}" if what == "tenant" else "two keys of tenants are the same"
                )
        pools = {pool.name for pool in self.pools}
        for tenant in self.tenants:
            if unknown := sorted(set(tenant.pools) - pools):
                raise ValueError(f"tenant {tenant.name!r} names the unknown pool {unknown[0]!r}")
        return self

    @model_validator(mode="after")
    def _policy_takes_its_options(self) -> Settings:
        build_policy(self.scheduling)
        return self

    @model_validator(mode="after")
    def _numbers_are_finite(self) -> Settings:
        for name in not_finite(self):
            raise ValueError(f"{name} must be finite")
        return self
