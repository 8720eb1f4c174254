"""One JSON line for every request that ended: ids, places, tokens, times and the outcome; never any text or key.

Requests that ended are made into lines many at a time, which takes a fraction of what a line takes in the middle of a
request. A thread writes them twice a second: a slow disk or a full pipe delays no request. What could not be written is
counted, and said in the log.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import orjson

from dualmap.router.requests.explain import Explanation
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.trace_context import TraceContext
from dualmap.router.timers import CallLater

log = logging.getLogger(__name__)

FLUSH_S = 0.5
LINES_AT_ONCE = 64
MAX_WAITING_LINES = 20_000
"""Most lines that wait while a write hangs; more are dropped."""


class Written(Protocol):
    """The stream that lines go to."""

    def write(self, data: bytes, /) -> Any: ...

    def close(self) -> None: ...


class RequestLog:
    """Writes lines to one file. ``ended`` never waits and never raises."""

    def __init__(self, file: Written, call_later: CallLater) -> None:
        self._file = file
        self._call_later = call_later
        self._ended: list[tuple[Explanation, TraceContext | None]] = []
        self._lines: list[bytes] = []
        self._dropped = 0
        self._flushing = False
        self._thread = ThreadPoolExecutor(1, "request-log")

    def ended(self, explanation: Explanation, trace: TraceContext | None) -> None:
        if len(self._lines) + len(self._ended) >= MAX_WAITING_LINES:
            self._dropped += 1
            return
        self._ended.append((explanation, trace))
        if len(self._ended) >= LINES_AT_ONCE:
            self._make_lines()
        if not self._flushing:
            self._flushing = True
            self._call_later(FLUSH_S, self._flush)

    def _make_lines(self) -> None:
        ended, self._ended = self._ended, []
        self._lines += [_line(*each) for each in ended]

    def _taken_lines(self) -> list[bytes]:
        self._make_lines()
        lines, self._lines = self._lines, []
        return lines

    def _flush(self) -> None:
        lines = self._taken_lines()
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("dropped %d lines of the request log: its file could not be written in time", dropped)
        written = asyncio.get_running_loop().run_in_executor(self._thread, self._file.write, b"".join(lines))
        written.add_done_callback(self._flushed)

    def _flushed(self, written: asyncio.Future[Any]) -> None:
        if not written.cancelled() and (error := written.exception()) is not None:
            log.error("the request log could not be written: %s", error)
        self._flushing = bool(self._lines or self._ended)
        if self._flushing:
            self._call_later(FLUSH_S, self._flush)

    def close(self) -> None:
        """Write what is left, behind what is being written."""
        lines = self._taken_lines()
        try:
            self._thread.submit(self._file.write, b"".join(lines)).result(FLUSH_S * 4)
            self._file.close()
        except (OSError, TimeoutError) as error:
            log.error("the request log lost %d lines at the end: %r", len(lines), error)
        self._thread.shutdown(wait=False)


def open_request_log(settings: RouterSettings, call_later: CallLater) -> RequestLog | None:
    """The log, if ``request_log`` names a file; else None.

    Raises:
        OSError: the file cannot be written.
    """
    if settings.request_log is None:
        return None
    if settings.request_log == "-":
        return RequestLog(_StandardOutput(), call_later)
    path = Path(settings.request_log)
    path.parent.mkdir(parents=True, exist_ok=True)
    return RequestLog(path.open("ab", buffering=0), call_later)


class _StandardOutput:
    """Standard output, which stays open."""

    def __init__(self) -> None:
        self._file: BinaryIO = sys.stdout.buffer

    def write(self, data: bytes, /) -> None:
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        pass


def _line(explanation: Explanation, trace: TraceContext | None) -> bytes:
    """Empty, and said in the log, where it cannot be made: that must not end the request that happens to make it."""
    try:
        return orjson.dumps(line_of(explanation, trace), option=orjson.OPT_APPEND_NEWLINE)
    except orjson.JSONEncodeError as error:
        log.error("request %s has no line in the request log: %s", explanation.origin.request_id, error)
        return b""


def line_of(explanation: Explanation, trace: TraceContext | None) -> dict[str, Any]:
    """One request as the log has it; what did not happen, or was not reported, is null."""
    origin, course, answer = explanation.origin, explanation.course, explanation.answer
    detours, rounds = explanation.detours, explanation.rounds
    return {
        "time": course.received_unix_s,
        "request_id": origin.request_id,
        "trace_id": None if trace is None else f"{trace.trace_id:032x}",
        "client": origin.client,
        "tenant": origin.tenant or None,
        "model": origin.model,
        "pool": origin.pool,
        "instance": answer.instance_id,
        "outcome": answer.outcome,
        "reason": rounds[-1].decision.reason if rounds else None,
        "attempts": answer.tries,
        "continued": len(detours.continued),
        "prompt_tokens": explanation.prompt_tokens,
        "expected_cached_tokens": answer.expected_cached_tokens,
        "cached_tokens": answer.usage.cached_tokens,
        "output_tokens": answer.usage.output_tokens,
        "held_s": course.held_s,
        "expected_ttft_s": explanation.expected_ttft_s,
        "ttft_s": course.first_token_s,
        "total_s": course.done_s,
        "slo_s": course.slo_s,
        "on_time": course.on_time,
    }
