"""Where the bytes of files and batches lie."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dualmap.router.batches.storage import BatchStorage, file_name, part_name, plan_name

BATCH = "batch_1"


@pytest.fixture(params=["folder", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> BatchStorage:
    return BatchStorage(str(tmp_path / "files") if request.param == "folder" else f"memory://{tmp_path}")


async def test_what_was_written_is_read_in_pieces_and_as_a_whole(storage: BatchStorage) -> None:
    data = bytes(range(256)) * 20_000

    assert await storage.copy_in(file_name("file-1"), io.BytesIO(data)) == len(data)

    pieces = [piece async for piece in storage.pieces(file_name("file-1"))]
    assert len(pieces) > 1
    assert b"".join(pieces) == data
    with storage.open(file_name("file-1")) as file:
        file.seek(100)
        assert file.read(3) == data[100:103]


async def test_a_batch_is_removed_with_its_parts_and_its_files_stay(storage: BatchStorage) -> None:
    await storage.write(file_name("file-1"), b"answers")
    await storage.write(plan_name(BATCH), b"plan")
    await storage.write(part_name(BATCH, "p", failed=True), b"error")

    await storage.remove_batch(BATCH)
    await storage.remove_batch(BATCH)

    for name in (plan_name(BATCH), part_name(BATCH, "p", failed=True)):
        with pytest.raises(FileNotFoundError):
            storage.open(name)
    with storage.open(file_name("file-1")) as file:
        assert file.read() == b"answers"


async def test_to_remove_what_is_not_there_is_no_error(storage: BatchStorage) -> None:
    await storage.write(file_name("file-1"), b"x")
    await storage.remove([file_name("file-0"), file_name("file-1")])

    with pytest.raises(FileNotFoundError):
        storage.open(file_name("file-1"))


def test_an_unknown_kind_of_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="no-such-kind"):
        BatchStorage("no-such-kind://somewhere")
