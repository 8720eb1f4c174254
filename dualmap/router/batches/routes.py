"""``/v1/files`` and ``/v1/batches``, as OpenAI's client speaks them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from dualmap.router.admin.auth import caller_of
from dualmap.router.admin.scope import RuntimeParam
from dualmap.router.batches.service import INPUT_PURPOSE, Batches, tenant_of
from dualmap.router.batches.storage import file_name
from dualmap.router.batches.upload_form import UploadForm
from dualmap.router.errors import NotFoundError
from dualmap.scheduling.batches.batch import Batch, Progress, Status
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.batches.batch_book import FileRecord

routes = APIRouter(prefix="/v1", tags=["batches"])

T = TypeVar("T")


def batches_of(request: Request) -> Batches:
    """Raises NotFoundError where the fleet has no storage."""
    batches: Batches | None = request.app.state.batches
    if batches is None:
        raise NotFoundError("this fleet keeps no files and runs no batches; set router.batches.storage")
    return batches


def sender(request: Request, runtime: RuntimeParam) -> Caller | None:
    return caller_of(runtime.tenants, request)


BatchesParam = Annotated[Batches, Depends(batches_of)]
Sender = Annotated[Caller | None, Depends(sender)]
After = Annotated[str | None, Query(description="the last one of the page before")]
Limit = Annotated[int, Query(ge=1, le=10_000, description="how many at most")]


# files -----------------------------------------------------------------------------------------------------------
_UPLOAD: Final = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": [INPUT_PURPOSE]},
                        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    },
                }
            }
        },
    }
}


@routes.post("/files", openapi_extra=_UPLOAD)
async def upload(request: Request, batches: BatchesParam, caller: Sender) -> dict[str, Any]:
    """Keep a file of requests for batches."""
    form = UploadForm(request.headers.get("content-type", ""))
    return file_object(await batches.upload(caller, form, request.stream()))


@routes.get("/files")
async def files(
    batches: BatchesParam,
    caller: Sender,
    after: After = None,
    limit: Limit = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: str | None = None,
) -> dict[str, Any]:
    """List own files, the latest first; with order=asc the oldest."""
    found = [each for each in await batches.book.files(tenant_of(caller)) if purpose in (None, each.purpose)]
    if order == "asc":
        found.reverse()
    return _page(found, lambda each: each.file_id, file_object, after, limit)


@routes.get("/files/{file_id}")
async def file(batches: BatchesParam, caller: Sender, file_id: str) -> dict[str, Any]:
    """Describe a file."""
    return file_object(await batches.file(caller, file_id))


@routes.get("/files/{file_id}/content")
async def content(batches: BatchesParam, caller: Sender, file_id: str) -> StreamingResponse:
    """Send what is in a file."""
    found = await batches.file(caller, file_id)
    pieces = batches.storage.pieces(file_name(found.file_id))
    length = {"content-length": str(found.size_bytes)}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=length)


@routes.delete("/files/{file_id}")
async def delete(batches: BatchesParam, caller: Sender, file_id: str) -> dict[str, Any]:
    """Delete a file that no open batch reads."""
    await batches.delete(caller, file_id)
    return {"id": file_id, "object": "file", "deleted": True}


# batches ---------------------------------------------------------------------------------------------------------
class NewBatch(BaseModel):
    """The batch that a client makes; fields that are not known here are ignored."""

    model_config = ConfigDict(extra="ignore")

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None = None


@routes.post("/batches")
async def create(batches: BatchesParam, caller: Sender, new: NewBatch) -> dict[str, Any]:
    """Have the requests of a file answered within a window."""
    made = await batches.create(caller, new.input_file_id, new.endpoint, new.completion_window, new.metadata or {})
    return batch_object(made, Progress())


@routes.get("/batches")
async def all_batches(batches: BatchesParam, caller: Sender, after: After = None, limit: Limit = 20) -> dict[str, Any]:
    """List own batches, the latest first."""
    found = await batches.batches(caller)
    page = _page(found, lambda each: each.batch_id, lambda each: each, after, limit)
    return page | {"data": [batch_object(each, await batches.progress(each)) for each in page["data"]]}


@routes.get("/batches/{batch_id}")
async def batch(batches: BatchesParam, caller: Sender, batch_id: str) -> dict[str, Any]:
    """Describe a batch, and how far it is."""
    found = await batches.batch(caller, batch_id)
    return batch_object(found, await batches.progress(found))


@routes.post("/batches/{batch_id}/cancel")
async def cancel(batches: BatchesParam, caller: Sender, batch_id: str) -> dict[str, Any]:
    """Begin no more requests of a batch; those that run are answered, and what was answered stays."""
    cancelled = await batches.cancel(caller, batch_id)
    return batch_object(cancelled, await batches.progress(cancelled))


# as clients read them --------------------------------------------------------------------------------------------
def _page(
    found: Sequence[T], name: Callable[[T], str], show: Callable[[T], Any], after: str | None, limit: int
) -> dict[str, Any]:
    names = [name(each) for each in found]
    first = names.index(after) + 1 if after in names else 0
    page = found[first : first + limit]
    return {
        "object": "list",
        "data": [show(each) for each in page],
        "first_id": name(page[0]) if page else None,
        "last_id": name(page[-1]) if page else None,
        "has_more": first + len(page) < len(found),
    }


def file_object(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_s,
        "expires_at": None,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


_STAMPS: Mapping[Status, str] = {each: f"{each.value}_at" for each in Status if each is not Status.VALIDATING}


def batch_object(batch: Batch, progress: Progress) -> dict[str, Any]:
    counts = (batch.completed, batch.failed) if batch.is_over else (progress.completed, progress.failed)
    errors = [
        {"code": each.code, "message": each.message, "line": each.line, "param": each.param} for each in batch.errors
    ]
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file or None,
        "error_file_id": batch.error_file or None,
        "created_at": batch.created_s,
        "expires_at": batch.expires_s,
        **{name: batch.entered_s.get(status) for status, name in _STAMPS.items()},
        "request_counts": {"total": batch.lines, "completed": counts[0], "failed": counts[1]},
        "metadata": batch.metadata or None,
    }
