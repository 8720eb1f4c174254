"""Lines of batches as requests of the fleet."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest

from dualmap.router.batches.line_client import LineClient
from dualmap.router.batches.line_runner import TRIES, LineResult, LineRunner
from dualmap.router.batches.plan import PlannedLine
from dualmap.router.batches.storage import BatchStorage, file_name
from dualmap.router.errors import QueueFullError, RouterError, UpstreamError
from dualmap.router.tenants.directory import TOKEN, TenantDirectory
from dualmap.router.tenants.tenant_record import KeyRecord, TenantRecord
from dualmap.runtime.tenant_settings import TenantKeySettings, TenantSettings
from tests.support.batches import NEW_BATCH


def test_a_line_is_of_the_class_that_the_token_of_its_maker_named() -> None:
    tenants = TenantDirectory([], [TenantSettings(name="acme")])
    plane: Any = SimpleNamespace(tenants=tenants)
    anything: Any = None
    runner = LineRunner(plane, anything, anything, anything)

    caller = runner._caller_of(replace(NEW_BATCH, key=TOKEN, priority_class="low"))

    assert caller is not None
    assert (caller.tenant.name, caller.key, caller.priority_class) == ("acme", TOKEN, "low")


def test_a_batch_outlives_the_rotation_of_its_key_and_not_its_revocation() -> None:
    def key(digit: str, name: str = "ci") -> KeyRecord:
        return KeyRecord(name=name, sha256=digit * 64)

    tenants = TenantDirectory([])
    anything: Any = None
    runner = LineRunner(SimpleNamespace(tenants=tenants), anything, anything, anything)
    batch = replace(NEW_BATCH, key="ci", key_digest="a" * 64)

    tenants.put("acme", TenantRecord(keys=(key("a"), key("c", "other"))), lambda _: True)
    made_by = runner._caller_of(batch)
    assert made_by is not None and made_by.digest.hex() == "a" * 64
    tenants.put("acme", TenantRecord(keys=(key("c", "other"), key("a"), key("b"))), lambda _: True)
    rotated = runner._caller_of(batch)
    assert rotated is not None and (rotated.key, rotated.digest.hex()) == ("ci", "b" * 64)
    tenants.put("acme", TenantRecord(keys=(key("c", "other"),)), lambda _: True)
    assert runner._caller_of(batch) is None
    tenants.remove("acme")
    assert runner._caller_of(replace(batch, key=TOKEN, key_digest="")) is None


def test_a_key_of_the_settings_is_found_by_its_name() -> None:
    keys = (TenantKeySettings(name="ci", sha256="a" * 64), TenantKeySettings(name="nightly", sha256="b" * 64))
    tenants = TenantDirectory([], [TenantSettings(name="acme", keys=keys)])

    found = [tenants.by_name(*names) for names in (("acme", "nightly"), ("acme", "x"), ("other", "ci"))]

    assert [each and each.digest.hex() for each in found] == ["b" * 64, None, None]


class Runner(LineRunner):
    """A runner whose requests meet these errors, one after the other, and then an answer."""

    def __init__(self, folder: Path, errors: Sequence[RouterError]) -> None:
        @contextlib.asynccontextmanager
        async def place(*_: str) -> AsyncIterator[str]:
            yield "a"

        async def sleep(time_s: float) -> None:
            self.waited.append((time_s, self.refused.total(), self.failing.total()))

        plane: Any = MagicMock()
        room: Any = SimpleNamespace(place=place)
        clock: Any = SimpleNamespace(sleep=sleep)
        super().__init__(plane, BatchStorage(str(folder)), room, clock)
        self.waited: list[tuple[float, int, int]] = []
        """The time of each wait, and the lines that were refused and that failed meanwhile."""
        self._errors = list(errors)

    async def _send(self, *_: object) -> LineClient:
        client = LineClient(NEW_BATCH.endpoint)
        if self._errors:
            client.refuse(self._errors.pop(0))
        else:
            client.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
        return client

    async def result(self) -> LineResult:
        line = {"custom_id": "one", "method": "POST", "url": NEW_BATCH.endpoint, "body": {"prompt": "p"}}
        text = orjson.dumps(line)
        await self._storage.write(file_name(NEW_BATCH.input_file), text)
        found = await self.run(NEW_BATCH, PlannedLine(0, len(text), 1), "a", lambda: False)
        assert found is not None
        return found


def unreached() -> UpstreamError:
    error = UpstreamError("connect", retry_after_s=1.0)
    error.is_unreached = True
    return error


@pytest.mark.parametrize(
    ("error", "refused"), [(QueueFullError("full", retry_after_s=1.0), True), (unreached(), False)]
)
async def test_a_line_that_no_instance_has_seen_waits_as_often_as_need_be(
    tmp_path: Path, error: RouterError, refused: bool
) -> None:
    runner = Runner(tmp_path, [error] * 50)

    assert (await runner.result()).is_answer

    assert len(runner.waited) == 50
    assert {(by_limit, by_fleet) for _, by_limit, by_fleet in runner.waited} == {(int(refused), int(not refused))}
    assert max(time_s for time_s, *_ in runner.waited) == 30.0


async def test_a_line_that_fails_on_instances_is_tried_a_few_times_with_time_to_recover(tmp_path: Path) -> None:
    error = UpstreamError("closed", retry_after_s=1.0)
    assert (await Runner(tmp_path, [error] * (TRIES - 1)).result()).is_answer

    runner = Runner(tmp_path, [error] * TRIES)
    assert not (await runner.result()).is_answer
    assert sum(time_s for time_s, *_ in runner.waited) == 14.0
