"""One JSON line for every request that ended."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dualmap.router.errors import NoInstanceError
from dualmap.router.requests.explain import Origin
from dualmap.router.requests.request_log import FLUSH_S, LINES_AT_ONCE, RequestLog
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from tests.router import tools


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_has_places_tokens_times_and_outcome_and_no_text(
    start_runtime: Any, clock: Any, tmp_path: Path
) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    runtime = await start_runtime(instances=(tools.spec("a"),), request_log=str(path))
    request = await runtime.intake.place(tools.request("secret " * 60, request_id="one"))
    await clock.advance(0.25)
    request.first_token()
    await clock.advance(0.5)
    request.finish(Outcome.COMPLETED, Usage(prompt_tokens=105, cached_tokens=16, output_tokens=7))

    await runtime.stop()

    [line] = lines(path)
    assert line | {"time": 0, "expected_ttft_s": 0, "reason": 0} == {
        "time": 0, "request_id": "one", "trace_id": None, "client": None, "tenant": None, "model": "default",
        "pool": "default",
        "instance": "a",
        "outcome": "completed", "reason": 0, "attempts": 1, "continued": 0,
        "prompt_tokens": 105, "expected_cached_tokens": 0,
        "cached_tokens": 16, "output_tokens": 7, "held_s": 0.0, "expected_ttft_s": 0, "ttft_s": 0.25, "total_s": 0.75,
        "slo_s": 5.0, "on_time": True,
    }  # fmt: skip
    assert "secret" not in path.read_text()


async def test_requests_that_are_passed_on_or_refused_have_a_line_too(start_runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")), request_log=str(path), max_attempts=2)
    passed = await runtime.intake.place(tools.request(path="/tokenize", request_id="embedded"))
    await passed.failed(Failed(InstanceFailure(FailureKind.CONNECT, "refused")))
    passed.finish(Outcome.COMPLETED, Usage(prompt_tokens=9))

    await runtime.stop()

    [line] = lines(path)
    assert (line["request_id"], line["attempts"], line["prompt_tokens"]) == ("embedded", 2, 9)
    assert line["reason"] is None


async def test_attempts_are_those_of_the_header_and_0_for_a_request_that_no_instance_had_room_for(
    start_runtime: Any, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    runtime = await start_runtime(instances=(), request_log=str(path))
    with pytest.raises(NoInstanceError):
        await runtime.intake.place(tools.request("nobody is there", request_id="refused"))

    await runtime.stop()

    [line] = lines(path)
    assert (line["request_id"], line["outcome"], line["attempts"]) == ("refused", "refused", 0)


class HungFile:
    """A pipe whose reader does not read, until it does."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.written = b""

    def write(self, data: bytes) -> None:
        self.go_on.wait(10)
        self.written += data

    def close(self) -> None:
        pass


async def test_a_file_that_hangs_delays_nobody_and_what_does_not_fit_is_counted(
    start_runtime: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dualmap.router.requests.request_log.MAX_WAITING_LINES", 3)
    runtime, file = await start_runtime(instances=(tools.spec("a"),)), HungFile()
    log = RequestLog(file, clock.call_later)
    explanation = (await runtime.intake.place(tools.request(request_id="r"))).explain()

    log.ended(explanation, None)
    await clock.advance(FLUSH_S)  # this write hangs
    for _ in range(5):
        log.ended(explanation, None)
    file.go_on.set()
    for _ in range(500):  # the thread that writes is a real one
        await asyncio.sleep(0.01)
        await clock.advance(FLUSH_S)
        if file.written.count(b"\n") == 4:
            break

    assert file.written.count(b"\n") == 4
    assert "dropped 2 lines" in caplog.text
    log.close()


async def test_lines_are_made_together_and_each_request_has_its_own(start_runtime: Any, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    runtime = await start_runtime(instances=(tools.spec("a"),), request_log=str(path))
    for number in range(LINES_AT_ONCE + 3):
        (await runtime.intake.place(tools.request(request_id=f"r{number}"))).finish(Outcome.COMPLETED)

    await runtime.stop()

    assert [line["request_id"] for line in lines(path)] == [f"r{number}" for number in range(LINES_AT_ONCE + 3)]


async def test_a_request_that_cannot_be_written_costs_only_its_own_line(
    start_runtime: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    explanation = (await runtime.intake.place(tools.request(request_id="r"))).explain()
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path.open("ab", buffering=0), lambda *_: None)

    log.ended(replace(explanation, origin=Origin("r", "\ud800", "default")), None)
    log.ended(explanation, None)
    log.close()

    assert [line["model"] for line in lines(path)] == ["default"]
    assert "has no line" in caplog.text
