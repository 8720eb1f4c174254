"""What clients may do with files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from dualmap.router.batches.service import Batches, CancelledBatches, open_batches
from dualmap.router.batches.upload_form import UploadForm
from dualmap.router.errors import (
    BodyTooLargeError,
    ConflictError,
    ForbiddenPathError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
)
from dualmap.router.settings import BatchSettings
from dualmap.router.tenants.directory import TOKEN
from dualmap.scheduling.batches.batch import Batch, Status
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.memory import MemoryStore
from tests.support.batches import FORM_TYPE, form_of

ACME, OTHER = Caller(Tenant("acme"), "ci"), Caller(Tenant("other"), "ci")


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    limits = {"max_file_bytes": 2048, "max_stored_bytes": 5000, "max_files": 4, "max_open": 2}
    found = open_batches(BatchSettings(storage=str(tmp_path), **limits), MemoryStore(SchedulingSettings()).batches)
    assert found is not None
    return found


async def sent(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


async def uploaded(batches: Batches, size_bytes: int = 10, caller: Caller | None = ACME, **form: str) -> str:
    return (await batches.upload(caller, UploadForm(FORM_TYPE), sent(form_of(b"x" * size_bytes, **form)))).file_id


def files_in(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file()]


async def made(batches: Batches, file_id: str, window: str = "24h") -> str:
    return (await batches.create(ACME, file_id, "/v1/completions", window, {})).batch_id


async def test_a_file_has_its_limit_of_bytes_and_so_have_all_of_a_tenant(batches: Batches) -> None:
    with pytest.raises(BodyTooLargeError, match=r"raise router\.batches\.max_file_bytes"):
        await uploaded(batches, 2049)
    for _ in range(2):
        await uploaded(batches, 2048)
    with pytest.raises(RateLimitError, match=r"raise router\.batches\.max_stored_bytes"):
        await uploaded(batches, 2048)
    await uploaded(batches, 2048, OTHER)


async def test_nothing_is_kept_of_a_file_that_is_refused(batches: Batches, tmp_path: Path) -> None:
    with pytest.raises(BodyTooLargeError):
        await uploaded(batches, 5000)
    with pytest.raises(InvalidRequestError, match="purpose must be 'batch'"):
        await uploaded(batches, purpose="fine-tune")
    with pytest.raises(InvalidRequestError, match="breaks off"):
        await batches.upload(ACME, UploadForm(FORM_TYPE), sent(form_of(b"x")[:-6]))

    assert await batches.book.files("acme") == []
    assert files_in(tmp_path) == []


async def test_a_tenant_has_a_limit_of_files_and_makes_room_by_deleting_one(batches: Batches) -> None:
    files = [await uploaded(batches) for _ in range(4)]
    with pytest.raises(RateLimitError, match="delete some"):
        await uploaded(batches)

    await batches.delete(ACME, files[0])

    await uploaded(batches)
    with pytest.raises(NotFoundError):
        await batches.file(ACME, files[0])


async def test_files_count_while_they_are_uploaded(batches: Batches) -> None:
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield form_of(b"x" * 1500)[:-20]
        begun.release()
        await go_on.wait()
        yield form_of(b"x" * 1500)[-20:]

    uploads = [asyncio.create_task(batches.upload(ACME, UploadForm(FORM_TYPE), slow())) for _ in range(3)]
    for _ in uploads:
        await begun.acquire()
    with pytest.raises(RateLimitError, match=r"raise router\.batches\.max_stored_bytes"):
        await uploaded(batches, 1500)
    await uploaded(batches)
    with pytest.raises(RateLimitError, match=r"raise router\.batches\.max_files"):
        await uploaded(batches)
    await uploaded(batches, 2000, OTHER)
    go_on.set()

    assert len([await each for each in uploads]) == 3
    assert batches._arriving_bytes("acme") == 0


async def test_no_batch_is_made_where_its_answers_would_have_no_room(batches: Batches) -> None:
    files = [await uploaded(batches) for _ in range(4)]
    with pytest.raises(RateLimitError, match=r"raise router\.batches\.max_files"):
        await made(batches, files[0])

    await batches.delete(ACME, files[1])

    await made(batches, files[0])


async def test_metadata_is_bounded_by_its_bytes(batches: Batches) -> None:
    file_id = await uploaded(batches)
    with pytest.raises(InvalidRequestError, match="metadata has over 16384 bytes"):
        await batches.create(ACME, file_id, "/v1/completions", "24h", {f"{n}": "€" * 500 for n in range(16)})


async def test_files_and_batches_are_seen_by_their_tenant_alone(batches: Batches) -> None:
    file_id = await uploaded(batches)
    batch_id = await made(batches, file_id)

    for caller in (OTHER, None):
        with pytest.raises(NotFoundError, match="GET /v1/files"):
            await batches.file(caller, file_id)
        with pytest.raises(NotFoundError, match="GET /v1/files"):
            await batches.create(caller, file_id, "/v1/completions", "24h", {})
        with pytest.raises(NotFoundError, match="GET /v1/batches"):
            await batches.cancel(caller, batch_id)
        assert await batches.batches(caller) == []


async def test_a_file_that_an_open_batch_reads_stays(batches: Batches) -> None:
    file_id = await uploaded(batches)
    batch_id = await made(batches, file_id)

    with pytest.raises(ConflictError, match="cancel it first"):
        await batches.delete(ACME, file_id)
    await batches.cancel(ACME, batch_id)

    await batches.delete(ACME, file_id)


async def test_all_open_batches_of_a_tenant_are_cancelled_or_those_of_one_key(batches: Batches) -> None:
    file_id = await uploaded(batches)
    by_token = Caller(ACME.tenant, TOKEN)
    by_key = await made(batches, file_id)
    batch = await batches.create(by_token, file_id, "/v1/completions", "24h", {})

    assert await batches.cancel_all("other") == CancelledBatches([], [])
    assert await batches.cancel_all("acme", TOKEN) == CancelledBatches([batch.batch_id], [])
    assert await batches.cancel_all("acme") == CancelledBatches([by_key], []), "the other one is cancelled already"
    assert {each.status for each in await batches.batches(ACME)} <= {Status.CANCELLING, Status.CANCELLED}


async def test_a_batch_that_others_keep_changing_is_named_among_those_that_run_on(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_id = await uploaded(batches)
    first, busy = [await made(batches, file_id) for _ in range(2)]
    change = batches.book.change

    async def change_before(was: Batch, becomes: Batch) -> bool:
        return was.batch_id != busy and await change(was, becomes)

    monkeypatch.setattr(batches.book, "change", change_before)

    assert await batches.cancel_all("acme") == CancelledBatches([first], [busy])
    with pytest.raises(ConflictError, match="try again"):
        await batches.cancel(ACME, busy)


async def test_a_tenant_has_a_limit_of_open_batches(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    file_id = await uploaded(batches)
    first = await made(batches, file_id)
    await made(batches, file_id)
    with pytest.raises(RateLimitError, match="not over yet"):
        await made(batches, file_id)

    await batches.cancel(ACME, first)

    read = batches.book.batches

    async def read_slowly(tenant: str) -> Sequence[Batch]:
        found = await read(tenant)
        await asyncio.sleep(0)
        return found

    monkeypatch.setattr(batches.book, "batches", read_slowly)
    results = await asyncio.gather(*(made(batches, file_id) for _ in range(5)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in results) == 1


@pytest.mark.parametrize("window", ["", "soon", "0h", "31d", "1.5h", "24"])
async def test_a_window_is_a_time_up_to_thirty_days(batches: Batches, window: str) -> None:
    with pytest.raises(InvalidRequestError, match="such as 24h"):
        await made(batches, await uploaded(batches), window)


async def test_no_batch_reaches_a_path_that_the_operator_has_closed(tmp_path: Path) -> None:
    closed = open_batches(
        BatchSettings(storage=str(tmp_path)),
        MemoryStore(SchedulingSettings()).batches,
        forbidden_paths=("/v1/responses", "/v1/embeddings"),
    )
    assert closed is not None
    file_id = await uploaded(closed)

    for endpoint in ("/v1/responses", "/v1/embeddings"):
        with pytest.raises(ForbiddenPathError, match=r"router\.forbidden_paths"):
            await closed.create(ACME, file_id, endpoint, "24h", {})
    await made(closed, file_id)


async def test_a_batch_keeps_the_class_that_the_token_of_its_maker_named(batches: Batches) -> None:
    caller = Caller(ACME.tenant, "(token)", b"", "low")
    file = await uploaded(batches, caller=caller)

    made = await batches.create(caller, file, "/v1/completions", "24h", {})

    assert (await batches.batch(ACME, made.batch_id)).priority_class == "low"


async def test_without_storage_there_are_no_batches() -> None:
    assert open_batches(BatchSettings(), MemoryStore(SchedulingSettings()).batches) is None
