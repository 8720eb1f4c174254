"""Where the bytes of files and batches lie: a folder, or what else fsspec opens, the same for all replicas.

    files/FILE_ID               what clients upload and download
    batches/BATCH_ID/plan       the lines of the input file, in the order in which they are run
    batches/BATCH_ID/PART.ok    answers of a range, and
    batches/BATCH_ID/PART.err   its errors, until they are in the batch's own files

No name comes from a client. What a replica that was killed had begun to write has a name that nothing leads to.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import BinaryIO, Final, cast

import fsspec

_CHUNK_BYTES: Final = 1 << 20


def file_name(file_id: str) -> str:
    return f"files/{file_id}"


def plan_name(batch_id: str) -> str:
    return f"batches/{batch_id}/plan"


def part_name(batch_id: str, part: str, *, failed: bool) -> str:
    return f"batches/{batch_id}/{part}.{'err' if failed else 'ok'}"


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

    async def copy_in(self, name: str, source: BinaryIO) -> int:
        """Write what ``source`` has; returns its bytes."""

        def write() -> int:
            with self.open_new(name) as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
                return file.tell()

        return await asyncio.to_thread(write)

    async def pieces(self, name: str) -> AsyncIterator[bytes]:
        """A file, piece by piece."""
        file = await asyncio.to_thread(self.open, name)
        try:
            while piece := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                yield piece
        finally:
            await asyncio.to_thread(file.close)

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
