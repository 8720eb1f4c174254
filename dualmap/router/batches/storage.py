"""Where the bytes of files and batches lie: a folder, or what else fsspec opens, the same for all replicas.

    files/FILE_ID               what clients upload and download
    batches/BATCH_ID/plan       the lines of the input file, in the order in which they are run
    batches/BATCH_ID/PART.ok    answers of a range, and
    batches/BATCH_ID/PART.err   its errors, until they are in the batch's own files

No name comes from a client. What a replica that was killed had begun to write has a name that nothing leads to;
``Cleaner`` removes it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Final, cast

import fsspec

from dualmap.router.batches.new_ids import is_id

_CHUNK_BYTES: Final = 1 << 20


def file_name(file_id: str) -> str:
    return f"files/{file_id}"


def plan_name(batch_id: str) -> str:
    return f"batches/{batch_id}/plan"


def part_name(batch_id: str, part: str, *, failed: bool) -> str:
    return f"batches/{batch_id}/{part}.{'err' if failed else 'ok'}"


class NewFile:
    """A file that is being written: what comes is gathered, so that few threads are begun."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size_bytes = 0
        self._gathered = bytearray()

    async def write(self, data: bytes) -> None:
        self.size_bytes += len(data)
        self._gathered += data
        if len(self._gathered) >= _CHUNK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        await asyncio.to_thread(self.file.write, gathered)


class BatchStorage:
    """Files by name. Coroutines work on threads; the others block, and are for threads."""

    def __init__(self, url: str) -> None:
        """``url`` is a folder, or a URL of fsspec (``s3://bucket/prefix``).

        Raises:
            ValueError, ImportError: fsspec knows no such URL, or lacks a package for it.
        """
        is_folder = "://" not in url
        self._files, self._root = fsspec.core.url_to_fs(str(Path(url).expanduser().absolute()) if is_folder else url)
        self._makes_folders = "file" in self._files.protocol

    def check_folder(self) -> None:
        """Raises OSError where the storage is a folder, and can be neither made nor written to."""
        if self._makes_folders:
            Path(self._root).mkdir(parents=True, exist_ok=True)
            if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(f"no permission to read and write in {self._root}")

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._files.open(self._path(name), "rb"))

    def open_new(self, name: str) -> BinaryIO:
        path = self._path(name)
        if self._makes_folders:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, self._files.open(path, "wb"))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    async def write(self, name: str, data: bytes) -> None:
        def write() -> None:
            with self.open_new(name) as file:
                file.write(data)

        await asyncio.to_thread(write)

    @asynccontextmanager
    async def writing(self, name: str) -> AsyncIterator[NewFile]:
        """A file that is written piece by piece, and removed where that fails."""
        new = NewFile(await asyncio.to_thread(self.open_new, name))
        try:
            yield new
            await new.flush()
        except BaseException:
            await asyncio.to_thread(new.file.close)
            await self.remove([name])
            raise
        await asyncio.to_thread(new.file.close)

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        """A file, piece by piece."""
        file = await asyncio.to_thread(self.open, name)
        try:
            while piece := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield piece
        finally:
            await asyncio.to_thread(file.close)

    async def ids(self) -> Sequence[str]:
        """The ids of the files, and of the batches for which something was written."""

        def listed() -> list[str]:
            found: list[str] = []
            for folder in map(self._path, ("files", "batches")):
                self._files.invalidate_cache(folder)
                try:
                    found += (path.rstrip("/").rpartition("/")[2] for path in self._files.ls(folder, detail=False))
                except FileNotFoundError:
                    continue
            return [each for each in found if is_id(each)]

        return await asyncio.to_thread(listed)

    async def remove(self, names: Iterable[str]) -> None:
        """Remove files, where they are there."""

        def remove() -> None:
            for name in names:
                try:
                    self._files.rm(self._path(name))
                except FileNotFoundError:
                    continue

        await asyncio.to_thread(remove)

    async def remove_batch(self, batch_id: str) -> None:
        """Remove all that was written for a batch but its files."""

        def remove() -> None:
            try:
                self._files.rm(self._path(f"batches/{batch_id}"), recursive=True)
            except FileNotFoundError:
                return

        await asyncio.to_thread(remove)


class StorageUnavailableError(ValueError):
    """The storage that is configured cannot be used."""


def open_storage(url: str) -> BatchStorage:
    """The storage at ``url``; a folder is made where it is missing.

    Raises:
        StorageUnavailableError: it cannot be used; the message says what to do.
    """
    try:
        storage = BatchStorage(url)
        storage.check_folder()
    except ImportError as error:
        raise StorageUnavailableError(f"router.batches.storage: {error}; install that package") from error
    except (ValueError, OSError) as error:
        raise StorageUnavailableError(
            f"router.batches.storage: {url!r} cannot be used: {error}; name a folder that this process may write to, or"
            " a URL of fsspec, such as s3://bucket/folder"
        ) from error
    return storage
