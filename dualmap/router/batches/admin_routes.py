"""``/admin/batches``: the batches of all tenants, for operators."""

from __future__ import annotations

import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query

from dualmap.router.admin.auth import ChangedBy
from dualmap.router.batches.routes import BatchesParam, batch_object
from dualmap.scheduling.batches.window import Outlook

log = logging.getLogger(__name__)

routes = APIRouter(prefix="/admin", tags=["batches"])


@routes.get("/batches")
async def batches(
    batches: BatchesParam,
    tenant: Annotated[
        str | None, Query(description="all batches of this tenant, also those that are over; empty: of no tenant")
    ] = None,
) -> dict[str, Any]:
    """Batches that are not over, those first whose windows end first, and how far each is."""
    book, now_s = batches.book, await batches.book.now_s()
    if tenant is not None:
        found = [*await book.batches(tenant)]
    else:
        named = [await book.batch(name, batch_id) for batch_id, name in (await book.open()).items()]
        found = sorted(filter(None, named), key=lambda each: each.expires_s)
    return {
        "now": now_s,
        "batches": [
            batch_object(each, await batches.progress(each))
            | {"tenant": each.tenant, "key": each.key, "forecast": forecast_of(batches.outlooks.get(each.batch_id))}
            for each in found
        ],
    }


@routes.post("/batches/cancel")
async def cancel(
    batches: BatchesParam,
    by: ChangedBy,
    tenant: Annotated[str, Query(description="the tenant whose batches they are; empty: those of no tenant")],
    key: Annotated[
        str | None,
        Query(
            description="those alone that were made with its key of this name; `(token)`, `(gateway)`: by such a caller"
        ),
    ] = None,
) -> dict[str, Any]:
    """Cancel all batches of a tenant that are not over, as their clients may: no more of their requests begin, and what
    was answered can be read. Those under `not_cancelled` run on, since others kept changing them: repeat the call."""
    found = await batches.cancel_all(tenant, key)
    log.info(
        "batches cancelled tenant=%s key=%s batches=%d left=%d by=%s",
        tenant or None, key, len(found.cancelled), len(found.left), by,
    )  # fmt: skip
    return {"cancelled": found.cancelled, "not_cancelled": found.left}


def forecast_of(outlook: Outlook | None) -> dict[str, Any]:
    """When the batch will be done at its present rate, and why that is too late, if it is."""
    if outlook is None:
        return {"ends_at": None, "delay": None}
    return {"ends_at": None if outlook.ends_s is None else round(outlook.ends_s), "delay": outlook.delay}
