"""Files and batches by the unmodified `openai` client, on a real fleet of two routers, of which one is killed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.fleet.fleet_process import QUICK, Fleet, running_fleet, until

OPTIONS = (*QUICK, "--instances", "2", "--replicas", "2", "--workers", "1")
CHAT = "/v1/chat/completions"
MOST_BYTES = 1 << 20
CLASSES = "scheduling: {classes: [{name: default}, {name: batch, evictable: true}]}"
"""So answers of lines are streams, which can continue elsewhere."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("batches")
    settings = directory / "fleet.yaml"
    settings.write_text(CLASSES)
    options = (
        *(*OPTIONS, "--config", str(settings), "--router.batches.storage", str(directory / "storage")),
        *("--router.batches.max_file_bytes", str(MOST_BYTES)),
    )
    with running_fleet(directory, options) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fleet.endpoint}/v1", api_key="any", max_retries=4, timeout=60) as client:
        yield client


def line(fleet: Fleet, number: int, **other: Any) -> dict[str, Any]:
    body = {"model": fleet.model, "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 3}
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body} | other


def made(client: OpenAI, lines: Sequence[object], window: Any = "24h", **more: Any) -> Batch:
    text = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    file = client.files.create(file=("lines.jsonl", io.BytesIO(text.encode())), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window, **more)


def ended(client: OpenAI, batch: Batch) -> Batch:
    def over() -> Batch | None:
        found = client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    return until(over, "the batch is over")


def read(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


def test_every_line_of_a_batch_is_answered_once(fleet: Fleet, client: OpenAI) -> None:
    lines = [line(fleet, number) for number in range(40)]
    lines[7]["body"]["n"] = 2  # whose answer is no stream
    batch = made(client, lines, metadata={"of": "test"})
    assert batch.status == "validating"

    over = ended(client, batch)

    assert over.status == "completed"
    assert over.request_counts is not None
    assert (over.request_counts.total, over.request_counts.completed, over.request_counts.failed) == (40, 40, 0)
    assert over.metadata == {"of": "test"}
    assert over.error_file_id is None
    answers = read(client, over.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{number}" for number in range(40))
    assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in answers)
    for each in answers:
        body = each["response"]["body"]
        assert body["object"] == "chat.completion"
        assert len(body["choices"]) == (2 if each["custom_id"] == "line-7" else 1)
        assert all(choice["message"]["content"] and choice["finish_reason"] for choice in body["choices"])
        assert body["usage"]["completion_tokens"] == 3 * len(body["choices"])
    assert batch.id in [each.id for each in client.batches.list()]
    listed = [each.id for each in client.files.list()]
    assert [each.id for each in client.files.list(order="asc", limit=1)] == listed[::-1]  # all pages of one
    assert {over.input_file_id, over.output_file_id} <= set(listed)
    client.files.delete(over.output_file_id or "")
    with pytest.raises(openai.NotFoundError, match="GET /v1/files"):
        client.files.retrieve(over.output_file_id or "")


def test_what_an_engine_refuses_is_in_the_file_of_errors(fleet: Fleet, client: OpenAI) -> None:
    bad = line(fleet, 1, body={"model": "no-such-model", "messages": [{"role": "user", "content": "x"}]})

    over = ended(client, made(client, [line(fleet, 0), bad]))

    assert over.status == "completed"
    assert [each["custom_id"] for each in read(client, over.output_file_id)] == ["line-0"]
    (error,) = read(client, over.error_file_id)
    assert error["custom_id"] == "line-1"
    assert error["response"]["status_code"] == 404
    assert "no-such-model" in error["response"]["body"]["error"]["message"]


def test_a_batch_with_bad_lines_fails_with_an_error_by_line_and_runs_nothing(fleet: Fleet, client: OpenAI) -> None:
    lines = [
        line(fleet, 0),
        "no JSON\n",
        line(fleet, 0),
        line(fleet, 3, url="/v1/embeddings"),
        line(fleet, 4, method="GET"),
        line(fleet, 5, body="text"),
    ]

    over = ended(client, made(client, lines))

    assert over.status == "failed"
    assert over.errors is not None
    assert [(each.line, each.code) for each in over.errors.data or ()] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "url_mismatch"),
        (5, "invalid_method"),
        (6, "missing_required_parameter"),
    ]
    assert over.output_file_id is None
    assert over.request_counts is not None and over.request_counts.total == 0


def test_a_cancelled_batch_keeps_what_was_answered(fleet: Fleet, client: OpenAI) -> None:
    batch = made(client, [line(fleet, number) for number in range(2000)])
    assert batch.id in fleet.dualmap("batches", "--url", fleet.endpoint)
    until(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed > 0, "some are answered")

    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")

    over = ended(client, batch)
    assert over.status == "cancelled"
    assert batch.id not in fleet.dualmap("batches", "--url", fleet.endpoint)
    assert batch.id in fleet.dualmap("batches", "--url", fleet.endpoint, "--tenant", "")
    assert over.request_counts is not None
    assert 0 < over.request_counts.completed < 2000
    assert len(read(client, over.output_file_id)) == over.request_counts.completed
    with pytest.raises(openai.ConflictError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_unusable_batches_are_refused_with_what_to_do(fleet: Fleet, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="GET /v1/files"):
        client.batches.create(input_file_id="file-" + 24 * "0", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="such as 24h"):
        made(client, [line(fleet, 0)], window="soon")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match=r"divide it, or raise router\.batches\.max_file_bytes") as refused:
        client.files.create(file=("a.jsonl", b" " * (MOST_BYTES + 1)), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.APIStatusError, match="takes DELETE, GET"):
        client.put("/files/x", cast_to=object)


def test_a_killed_router_loses_and_doubles_no_line(fleet: Fleet, client: OpenAI) -> None:
    batch = made(client, [line(fleet, number) for number in range(1500)])
    until(lambda: (client.batches.retrieve(batch.id).request_counts or batch).completed > 0, "some are answered")

    fleet.kill("router-1")

    over = ended(client, batch)
    assert over.status == "completed"
    answers = read(client, over.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(f"line-{number}" for number in range(1500))
    assert read(client, over.error_file_id) == []


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "text", "max_tokens": 3},
    "/v1/embeddings": {"input": "text"},
    "/v1/responses": {"input": "text", "max_output_tokens": 16},
}


@pytest.mark.parametrize("endpoint", sorted(BODIES))
def test_every_endpoint_of_batches_is_answered(fleet: Fleet, client: OpenAI, endpoint: Any) -> None:
    body = {"model": fleet.model, **BODIES[endpoint]}
    lines = [line(fleet, number, url=endpoint, body=body) for number in range(20)]
    text = "".join(json.dumps(each) + "\n" for each in lines)
    file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")

    over = ended(client, client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h"))

    assert over.status == "completed"
    assert read(client, over.error_file_id) == []
    answers = read(client, over.output_file_id)
    assert len({each["custom_id"] for each in answers}) == len(answers) == 20
    parts = {"/v1/completions": "choices", "/v1/embeddings": "data", "/v1/responses": "output"}
    assert all(each["response"]["body"][parts[endpoint]] for each in answers)


def test_a_line_is_explained_by_its_id(fleet: Fleet, client: OpenAI) -> None:
    over = ended(client, made(client, [line(fleet, 0)]))
    (answer,) = read(client, over.output_file_id)

    assert "instance-" in fleet.dualmap("explain", answer["id"], "--url", fleet.endpoint)
