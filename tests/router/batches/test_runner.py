"""The work of one replica on batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest

from dualmap.router.batches.runner import BatchRunner
from dualmap.router.batches.service import Batches, open_batches
from dualmap.router.batches.upload_form import UploadForm
from dualmap.router.settings import BatchSettings
from dualmap.scheduling.batches.batch import Batch, Status
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.memory import MemoryStore
from tests.support.batches import FORM_TYPE, form_of

URL = "/v1/completions"


class Lines:
    """Stands for what runs lines: they wait, but one that raises."""

    line_s = 1.0

    def __init__(self) -> None:
        self.refused = self.failing = Counter[str]()
        self.begun = self.running = 0

    def pool_of(self, batch: Batch, model: int) -> str:
        return "p"

    async def run(self, batch: Batch, planned: Any, preferred: str, ends: object) -> None:
        self.begun += 1
        self.running += 1
        try:
            await asyncio.sleep(0)
            if planned.number == 2:
                raise OSError("it cannot be read")
            await asyncio.Event().wait()
        finally:
            self.running -= 1


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    found = open_batches(BatchSettings(storage=str(tmp_path)), MemoryStore(SchedulingSettings()).batches)
    assert found is not None
    return found


def runner_of(batches: Batches, lines: Lines) -> BatchRunner:
    runtime: Any = SimpleNamespace(
        context=SimpleNamespace(clock=None, replica_id="one"), pools=SimpleNamespace(pools={}),
        tenants=SimpleNamespace(tenants={}),
    )  # fmt: skip
    plane: Any = SimpleNamespace(settings=SimpleNamespace(max_body_bytes=1 << 20), metrics=MagicMock())
    runner = BatchRunner(runtime, plane, batches)
    runner._lines = lines  # type: ignore[assignment]
    return runner


async def test_where_one_line_of_a_range_raises_the_others_end_and_the_range_waits_for_its_lease(
    batches: Batches,
) -> None:
    lines = Lines()
    runner = runner_of(batches, lines)
    texts = [{"custom_id": str(n), "method": "POST", "url": URL, "body": {"prompt": "p"}} for n in range(8)]

    async def body() -> Any:
        yield form_of(b"\n".join(map(orjson.dumps, texts)))

    file = await batches.upload(None, UploadForm(FORM_TYPE), body())
    made = await batches.create(None, file.file_id, URL, "24h", {})

    async def until(status: Status, begun: int) -> Batch:
        for _ in range(1000):
            await runner._look_around()
            found = await batches.batch(None, made.batch_id)
            if found.status is status and lines.begun >= begun:
                return found
            await asyncio.sleep(0.001)
        raise AssertionError("it does not get there")

    batch = await until(Status.IN_PROGRESS, 8)
    await asyncio.gather(*runner._tasks.values())

    assert lines.running == 0
    assert await batches.book.claims(batch) == {"0"}
    await runner._look_around()
    assert lines.begun == 8


async def test_a_short_window_takes_no_room_from_the_batches_of_another_tenant(
    batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting(Lines):
        async def run(self, *_: object) -> None:
            await asyncio.Event().wait()

    runner = runner_of(batches, Waiting())
    texts = [{"custom_id": str(n), "method": "POST", "url": URL, "body": {"prompt": "p"}} for n in range(64)]

    async def body() -> Any:
        yield form_of(b"\n".join(map(orjson.dumps, texts)))

    async def made(tenant: str, window: str) -> str:
        caller = Caller(Tenant(tenant), "ci")
        file = await batches.upload(caller, UploadForm(FORM_TYPE), body())
        return (await batches.create(caller, file.file_id, URL, window, {})).batch_id

    names = [await made("patient", "24h"), await made("hasty", "1m")]
    await runner._look_around()  # both are planned
    await asyncio.gather(*runner._tasks.values())

    begun = []
    for _ in range(4):
        waiting = iter([0, 16])  # there is room for a range of one batch
        monkeypatch.setattr(runner._room, "waiting", lambda *_, left=waiting: next(left))
        await runner._look_around()
        begun.append([sum(each[0] == name for each in runner._tasks) for name in names])
    for task in [*runner._tasks.values()]:
        task.cancel()

    assert begun == [[0, 1], [1, 1], [1, 2], [2, 2]]
