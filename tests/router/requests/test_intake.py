"""Limits that a request draws from, by the names that it may have for its model."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import QuotaSpentError
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.tenant_settings import LimitSettings, TenantSettings
from dualmap.scheduling.tenants.tenant import Caller
from tests.router import tools

POOL = PoolSettings(model="base", aliases=("gpt",))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
@pytest.mark.parametrize(
    ("limited", "drawing", "others"), [("base", ("base", "", "gpt"), ()), ("gpt", ("gpt",), ("", "base"))]
)
async def test_a_models_limit_holds_by_every_name_that_leads_to_it(
    start_runtime: Any, path: str, limited: str, drawing: tuple[str, ...], others: tuple[str, ...]
) -> None:
    acme = TenantSettings(name="acme", model_limits={limited: LimitSettings(requests_per_day=1)}).tenant()
    runtime = await start_runtime(instances=(tools.spec("a"),), pools=(POOL,))

    async def place(model: str) -> None:
        await runtime.intake.place(tools.request(path=path, model=model, caller=Caller(acme, "ci")))

    await place(drawing[-1])
    for model in drawing:
        with pytest.raises(QuotaSpentError):
            await place(model)
    for model in others:
        await place(model)
