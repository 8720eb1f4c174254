"""``/admin/batches``: the batches of all tenants, for operators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from dualmap.router.batches.routes import BatchesParam, batch_object

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
            batch_object(each, await batches.progress(each)) | {"tenant": each.tenant, "key": each.key}
            for each in found
        ],
    }
