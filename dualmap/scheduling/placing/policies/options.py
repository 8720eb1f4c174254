"""Parameters of single policies: the entries of the setting ``policy_options``, which each policy checks itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class PolicyOptions(BaseModel):
    """Base of the parameters of a policy. One that takes none has no subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
