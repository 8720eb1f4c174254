"""Refused: the router answers itself."""

from __future__ import annotations

import pytest

from dualmap.router.errors import NoInstanceError, OutOfFilesError, QueueFullError
from dualmap.router.http.upstream_pool import UpstreamPool
from dualmap.scheduling.request.outcome import Outcome
from dualmap.statestore.errors import StoreUnavailableError
from tests.router.http.kit import Talk
from tests.router.http.phases.answers import StartFleet, whole_answer


async def test_a_replica_without_descriptors_refuses_and_blames_no_instance(
    fleet: StartFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake, instances, client = await fleet(whole_answer, whole_answer)

    async def no_descriptor_left(*_: object, **__: object) -> None:
        raise OutOfFilesError("no file descriptor left", retry_after_s=1.0)

    monkeypatch.setattr(UpstreamPool, "connect", no_descriptor_left)
    client.chat()
    answer = await client.answer()

    assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "out_of_files", "1")
    assert intake.placed_request.failures == [] and intake.placed_request.outcome is Outcome.REFUSED
    assert [instance.connections for instance in instances] == [0, 0]


async def test_a_refused_placement_is_the_answer(fleet: StartFleet) -> None:
    intake, _, client = await fleet(whole_answer, refusal=QueueFullError("all full", retry_after_s=3))
    client.chat(headers="x-request-id: r9\r\n")
    answer = await client.answer()
    assert answer.status == 429 and answer.headers["retry-after"] == "3"
    assert answer.headers["x-request-id"] == "r9" and answer.error["code"] == "queue_full"
    intake.refusal = NoInstanceError("nobody is ready")
    client.chat()
    assert (await client.answer()).status == 503


async def test_a_store_that_is_away_is_a_503_and_a_bug_is_a_500_that_tells_nothing(
    fleet: StartFleet, caplog: pytest.LogCaptureFixture
) -> None:
    intake, _, client = await fleet(whole_answer, refusal=StoreUnavailableError("redis://secret"))
    client.chat()
    answer = await client.answer()
    assert answer.status == 503 and "secret" not in answer.error["message"]
    intake.refusal = KeyError("secret")
    client.chat()
    answer = await client.answer()
    assert answer.status == 500 and "secret" not in answer.error["message"]
    assert "secret" in caplog.text


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
async def test_an_unknown_path_is_the_instances_and_one_that_changes_an_engine_is_refused(
    fleet: StartFleet, method: str
) -> None:
    async def nothing_there(talk: Talk) -> None:
        await talk.answer({"detail": "Not Found"}, status=404)

    intake, [instance], client = await fleet(nothing_there)
    client.request("/v2/brand/new?a=1", method=method)
    answer = await client.answer()
    assert (answer.status, answer.json()) == (404, {"detail": "Not Found"})
    assert instance.talks[0].head.startswith(f"{method} /v2/brand/new?a=1 HTTP/1.1".encode())
    client.request("/update_weights", method=method)
    assert ((refused := await client.answer()).status, refused.error["code"]) == (403, "forbidden_path")
    assert len(intake.requests) == 1
