"""What clients may do with files and batches. Each sees those of its own tenant alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from dualmap.api_bodies.batch_lines import ENDPOINTS
from dualmap.router.batches.new_ids import is_id, new_batch_id, new_file_id
from dualmap.router.batches.storage import BatchStorage, file_name, open_storage
from dualmap.router.batches.upload_form import FILE_FIELD, UploadForm
from dualmap.router.errors import (
    BodyTooLargeError,
    ConflictError,
    ForbiddenPathError,
    InvalidRequestError,
    NotFoundError,
    RateLimitError,
)
from dualmap.router.http.paths import forbidden_path_finder
from dualmap.router.settings import BatchSettings
from dualmap.scheduling.batches.batch import Batch, BatchTransitionError, Progress
from dualmap.scheduling.batches.window import Outlook
from dualmap.scheduling.tenants.tenant import Caller
from dualmap.statestore.batches.batch_book import BatchBook, FileRecord

INPUT_PURPOSE: Final = "batch"
_WINDOW: Final = re.compile(r"([1-9]\d{0,3})([mhd])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400}
_LONGEST_WINDOW_S: Final = 30 * 86400
_MOST_METADATA: Final = 16
_METADATA_BYTES: Final = 16 << 10
"""Bytes of all pairs: they are in the batch's record, which replicas read again and again."""
_CHANGES: Final = 8
"""Times that a change is tried while others change the same batch."""


@dataclass(slots=True, eq=False)
class _Arrival:
    """A file that is being uploaded."""

    tenant: str
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CancelledBatches:
    """The batches, by their ids, that were to be cancelled together."""

    cancelled: Sequence[str]
    left: Sequence[str]
    """Batches that still run, since others changed them each time that this was tried."""


class Batches:
    """The files and batches of a fleet."""

    def __init__(
        self,
        storage: BatchStorage,
        book: BatchBook,
        settings: BatchSettings,
        *,
        is_forbidden: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``is_forbidden``: whether requests for a path are not passed on (``router.forbidden_paths``)."""
        self._is_forbidden = is_forbidden
        self.storage = storage
        self.book = book
        self.settings = settings
        self._arriving = set[_Arrival]()
        self._creates = asyncio.Lock()
        self.outlooks: Mapping[str, Outlook] = {}
        """The forecast of each batch that is not over, as this replica sees it."""

    # files -------------------------------------------------------------------------------------------------------
    async def upload(self, caller: Caller | None, form: UploadForm, body: AsyncIterable[bytes]) -> FileRecord:
        """Write the file of a form to storage while its body comes."""
        tenant, file_id, most_bytes = tenant_of(caller), new_file_id(), self.settings.max_file_bytes
        await self._check_room(tenant, 1)
        with self._arrives(tenant) as arrival:
            async with self.storage.writing(file_name(file_id)) as new:
                async for piece in body:
                    await new.write(form.feed(piece))
                    arrival.size_bytes = new.size_bytes
                    if new.size_bytes > most_bytes:
                        advice = "divide it, or raise router.batches.max_file_bytes"
                        raise BodyTooLargeError(f"the file is over {most_bytes} bytes; {advice}", param=FILE_FIELD)
                    self._check_bytes(self._arriving_bytes(tenant))
                form.end()
                if form.fields.get("purpose") != INPUT_PURPOSE:
                    raise InvalidRequestError(
                        f"purpose must be {INPUT_PURPOSE!r}: files are for batches here", param="purpose"
                    )
                await self._check_room(tenant, 0)
            file = FileRecord(
                file_id=file_id,
                tenant=tenant,
                name=(form.file_name or "")[:_LONGEST_NAME],
                purpose=INPUT_PURPOSE,
                size_bytes=new.size_bytes,
                created_s=await self.book.now_s(),
            )
            await self.book.put_file(file)
        return file

    @contextmanager
    def _arrives(self, tenant: str) -> Iterator[_Arrival]:
        """A file of the tenant that counts while it is uploaded."""
        arrival = _Arrival(tenant)
        self._arriving.add(arrival)
        try:
            yield arrival
        finally:
            self._arriving.discard(arrival)

    def _arriving_bytes(self, tenant: str) -> int:
        return sum(each.size_bytes for each in self._arriving if each.tenant == tenant)

    async def _check_room(self, tenant: str, more: int) -> None:
        """Raises RateLimitError where the tenant may not keep so many more files, or has too many bytes. Those that are
        being uploaded through this replica count."""
        files = await self.book.files(tenant)
        count = len(files) + sum(each.tenant == tenant for each in self._arriving)
        if count + more > self.settings.max_files:
            raise RateLimitError(
                f"there are {count} files already; delete some, or raise router.batches.max_files", param=FILE_FIELD
            )
        self._check_bytes(sum(each.size_bytes for each in files) + self._arriving_bytes(tenant))

    def _check_bytes(self, size_bytes: int) -> None:
        if size_bytes > self.settings.max_stored_bytes:
            raise RateLimitError(
                f"your files would have over {self.settings.max_stored_bytes} bytes; delete some, or raise"
                " router.batches.max_stored_bytes",
                param=FILE_FIELD,
            )

    async def file(self, caller: Caller | None, file_id: str) -> FileRecord:
        found = await self.book.file(tenant_of(caller), file_id) if is_id(file_id) else None
        if found is None:
            raise NotFoundError(f"there is no file {file_id[:64]!r}; GET /v1/files lists yours", param="file_id")
        return found

    async def delete(self, caller: Caller | None, file_id: str) -> None:
        file = await self.file(caller, file_id)
        for batch in await self.book.batches(file.tenant):
            if batch.input_file == file_id and not batch.is_over:
                raise ConflictError(f"batch {batch.batch_id} reads the file; cancel it first", param="file_id")
        await self.book.remove_file(file.tenant, file_id)
        await self.storage.remove([file_name(file_id)])

    # batches -----------------------------------------------------------------------------------------------------
    async def create(
        self, caller: Caller | None, input_file: str, endpoint: str, window: str, metadata: Mapping[str, str]
    ) -> Batch:
        if endpoint not in ENDPOINTS:
            raise InvalidRequestError(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        if self._is_forbidden(endpoint):
            raise ForbiddenPathError(f"{endpoint} is not passed on, as router.forbidden_paths says", param="endpoint")
        if len(metadata) > _MOST_METADATA:
            raise InvalidRequestError(f"metadata has more than {_MOST_METADATA} pairs", param="metadata")
        window_s = _seconds_of(window)
        file = await self.file(caller, input_file)
        if file.purpose != INPUT_PURPOSE:
            raise InvalidRequestError("the file was not uploaded with purpose 'batch'", param="input_file_id")
        if sum(len(name.encode()) + len(text.encode()) for name, text in metadata.items()) > _METADATA_BYTES:
            raise InvalidRequestError(f"metadata has over {_METADATA_BYTES} bytes", param="metadata")
        await self._check_room(file.tenant, 1)  # its answers will be files
        now_s = await self.book.now_s()
        batch = Batch(
            batch_id=new_batch_id(),
            tenant=file.tenant,
            key="" if caller is None else caller.key,
            key_digest="" if caller is None else caller.digest.hex(),
            priority_class="" if caller is None else caller.priority_class,
            endpoint=endpoint,
            input_file=input_file,
            completion_window=window,
            created_s=now_s,
            expires_s=now_s + window_s,
            metadata=dict(metadata),
        )
        async with self._creates:  # else many at once would all be the last one that may be opened
            opened = sum(not each.is_over for each in await self.book.batches(file.tenant))
            if opened >= self.settings.max_open:
                raise RateLimitError(f"{opened} batches are not over yet; wait for some of them, or cancel them")
            await self.book.create(batch)
        return batch

    async def batch(self, caller: Caller | None, batch_id: str) -> Batch:
        return await self._batch(tenant_of(caller), batch_id)

    async def _batch(self, tenant: str, batch_id: str) -> Batch:
        found = await self.book.batch(tenant, batch_id) if is_id(batch_id) else None
        if found is None:
            raise NotFoundError(f"there is no batch {batch_id[:64]!r}; GET /v1/batches lists yours", param="batch_id")
        return found

    async def batches(self, caller: Caller | None) -> Sequence[Batch]:
        return await self.book.batches(tenant_of(caller))

    async def progress(self, batch: Batch) -> Progress:
        return Progress() if batch.is_over else await self.book.progress(batch)

    async def cancel(self, caller: Caller | None, batch_id: str) -> Batch:
        if (cancelled := await self._cancel(tenant_of(caller), batch_id)) is None:
            raise ConflictError(f"batch {batch_id} is changed by others again and again; try again")
        return cancelled

    async def _cancel(self, tenant: str, batch_id: str) -> Batch | None:
        """Cancel a batch; None where others changed it each time that this was tried."""
        for _ in range(_CHANGES):
            batch = await self._batch(tenant, batch_id)
            try:
                cancelled = batch.cancelled(await self.book.now_s())
            except BatchTransitionError as error:
                raise ConflictError(f"batch {batch_id} is {batch.status}, and cannot be cancelled") from error
            if await self.book.change(batch, cancelled):
                return cancelled
        return None

    async def cancel_all(self, tenant: str, key: str | None = None) -> CancelledBatches:
        """Cancel all batches of a tenant that are not over, or those that were made with a key of this name."""
        cancelled, left = list[str](), list[str]()
        for batch in await self.book.batches(tenant):
            if not batch.is_over and key in (None, batch.key):
                with suppress(ConflictError, NotFoundError):  # it has just ended
                    is_cancelled = await self._cancel(tenant, batch.batch_id) is not None
                    (cancelled if is_cancelled else left).append(batch.batch_id)
        return CancelledBatches(cancelled, left)


def open_batches(settings: BatchSettings, book: BatchBook, *, forbidden_paths: Iterable[str] = ()) -> Batches | None:
    """The files and batches of a fleet; None where no storage is configured.

    Raises:
        StorageUnavailableError: the storage cannot be used.
    """
    if settings.storage is None:
        return None
    storage = open_storage(settings.storage)
    return Batches(storage, book, settings, is_forbidden=forbidden_path_finder(forbidden_paths))


def tenant_of(caller: Caller | None) -> str:
    return "" if caller is None else caller.tenant.name


_LONGEST_NAME: Final = 255


def _seconds_of(window: str) -> int:
    """The completion window in seconds. Raises InvalidRequestError."""
    found = _WINDOW.fullmatch(window)
    window_s = 0 if found is None else int(found[1]) * _SECONDS[found[2]]
    if not 0 < window_s <= _LONGEST_WINDOW_S:
        raise InvalidRequestError(
            "completion_window must be a time up to 30d, such as 24h or 90m", param="completion_window"
        )
    return window_s
