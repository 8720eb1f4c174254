"""Parameters of single policies: the entries of the setting ``policy_options``, which each policy checks itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PolicyOptions(BaseModel):
    """Base of the parameters of a policy. One that takes none has no subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TierCredits(PolicyOptions):
    """Constants by which a policy without prices counts blocks in tiers (``scheduling.estimates.kv_tiers``)."""

    host_credit: float = Field(1.0, ge=0, le=1, description="weight of a block in host memory")
    disk_credit: float = Field(1.0, ge=0, le=1, description="weight of a block on disk")
    pool_credit: float = Field(1.0, ge=0, le=1, description="weight of a block in a shared store")

    def credit(self, tier: str) -> float:
        """The weight of a block in this tier."""
        return {"host": self.host_credit, "disk": self.disk_credit, "pool": self.pool_credit}[tier]
