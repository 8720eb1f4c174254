"""Where the bytes of files and batches lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.router.batches.new_ids import new_batch_id, new_file_id
from dualmap.router.batches.storage import (
    BatchStorage,
    StorageUnavailableError,
    file_name,
    open_storage,
    part_name,
    plan_name,
)

BATCH = "batch_1"


@pytest.fixture(params=["folder", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BatchStorage]:
    if request.param == "s3":
        with s3_of(request) as url:
            yield BatchStorage(url)
    else:
        yield BatchStorage(str(tmp_path / "files") if request.param == "folder" else f"memory://{tmp_path}")


@contextlib.contextmanager
def s3_of(request: pytest.FixtureRequest) -> Iterator[str]:
    """A bucket of a server on this machine that speaks S3, as fsspec's package for it finds it."""
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs")
    servers = pytest.importorskip("moto.server", reason="needs moto[server]")
    server = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    values = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in (values | {"DEFAULT_REGION": "us-east-1"}).items():
        patch.setenv(f"AWS_{name}", value)
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)
        yield "s3://bucket/folder"
    finally:
        patch.undo()
        server.stop()


async def test_what_was_written_is_read_in_pieces_and_as_a_whole(storage: BatchStorage) -> None:
    data = bytes(range(256)) * 20_000

    async with storage.writing(file_name("file-1")) as new:
        for start in range(0, len(data), 70_000):
            await new.write(data[start : start + 70_000])
    assert new.size_bytes == len(data)

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


async def test_the_ids_of_all_that_is_there_are_listed(storage: BatchStorage) -> None:
    assert await storage.ids() == []
    file_id, batch_id = new_file_id(), new_batch_id()
    await storage.write(file_name(file_id), b"x")
    await storage.write(plan_name(batch_id), b"x")
    await storage.write(file_name("not-ours"), b"x")

    assert await storage.ids() == [file_id, batch_id]
    await storage.remove([file_name(file_id)])
    await storage.remove_batch(batch_id)
    assert await storage.ids() == []


async def test_to_remove_what_is_not_there_is_no_error(storage: BatchStorage) -> None:
    await storage.write(file_name("file-1"), b"x")
    await storage.remove([file_name("file-0"), file_name("file-1")])

    with pytest.raises(FileNotFoundError):
        storage.open(file_name("file-1"))


def test_storage_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for url in ("no-such-kind://somewhere", str(tmp_path / "file"), str(tmp_path / "file" / "below")):
        with pytest.raises(StorageUnavailableError, match=r"router\.batches\.storage: .* name a folder") as refused:
            open_storage(url)
        assert url in str(refused.value)


def test_a_folder_for_storage_is_made_where_it_is_missing(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "new" / "folder"))

    assert (tmp_path / "new" / "folder").is_dir()
