"""Making a trace from recordings of replicas: merged, in order of arrival, in Mooncake's format.

A replica appends a line for each request as it finishes (``router.telemetry.recording``): wall-clock time, lengths,
salted hashes of the full blocks, the block size as the replica assumed it then, and a fingerprint of the salt. Here the
lines of all replicas are sorted, their hashes become small numbers in order of appearance, and all lines get one block
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import orjson

from dualmap.simulation.errors import TraceError
from dualmap.simulation.workload.traces import Measured, Trace, TraceRequest

_REPORT_BYTES = 1 << 20


class RecordedRequest(NamedTuple):
    """One line of a recording."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]
    block_tokens: int
    salt: str
    """The fingerprint of the salt: hashes of different salts cannot be compared."""
    slo_ttft_ms: int = 0
    """TTFT SLO that the request named; 0: it left it to the fleet."""
    tenant: str = ""
    priority: str = ""
    adapter: str = ""
    session: str = ""
    """The run that it is a turn of, as a salted hash; empty: none that was known."""
    duration_ms: int = -1
    """Time until its answer had ended; -1: the release that recorded it did not measure."""
    ttft_ms: int = -1
    """-1: its first token was not seen."""
    cached_tokens: int = -1
    """-1: its instance did not say."""

    @property
    def measured(self) -> Measured | None:
        if self.duration_ms < 0:
            return None
        return Measured(
            self.duration_ms / 1000,
            None if self.ttft_ms < 0 else self.ttft_ms / 1000,
            None if self.cached_tokens < 0 else self.cached_tokens,
        )


def merge_recordings(
    paths: Sequence[str | Path], name: str = "recording", *, read: Callable[[int], None] = lambda count: None
) -> Trace:
    """One trace out of the recordings of all replicas; ``read`` is called with the number of bytes that were read since
    the last time.

    Raises:
        TraceError: a file cannot be read, a line is broken, salts differ, or all files are empty.
    """
    recorded: list[RecordedRequest] = []
    for path in map(Path, paths):
        for number, request in _read(path, read):
            if recorded and request.salt != recorded[0].salt:
                raise TraceError(path, number, _OTHER_SALT)
            recorded.append(request)
    recorded.sort()
    if not recorded:
        raise TraceError(", ".join(map(str, paths)) or name, None, "holds no requests")
    block_tokens = round(median(request.block_tokens for request in recorded))
    return Trace(name, block_tokens, tuple(_as_trace(recorded, block_tokens)))


def is_recording(path: Path) -> bool:
    """Whether a file is what a replica wrote, and not the trace that was made of it; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            row = orjson.loads(file.readline())
    except (OSError, orjson.JSONDecodeError):
        return False
    return isinstance(row, dict) and "salt" in row


_OTHER_SALT = (
    "recorded with another salt than the lines before, so that what they share cannot be seen: set router.record_salt, "
    "the same on all replicas (without it each generates its own at every start), or merge files of one salt alone"
)


def render_mooncake(trace: Trace) -> str:
    """The trace as Mooncake JSONL; ``block_tokens`` is on every line too, which other readers ignore."""
    return "".join(
        orjson.dumps(_mooncake_row(request, trace.block_tokens), option=orjson.OPT_APPEND_NEWLINE).decode()
        for request in trace.requests
    )


def _mooncake_row(request: TraceRequest, block_tokens: int) -> dict[str, object]:
    row: dict[str, object] = {
        "timestamp": round(request.arrival_s * 1000),
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.hash_ids,
        "block_tokens": block_tokens,
    }
    if request.slo_ttft_s is not None:
        row["slo_ttft_ms"] = round(request.slo_ttft_s * 1000)
    if request.session:
        row["session_id"] = request.session
    if request.think_s is not None:
        row["delay"] = round(request.think_s * 1000)
    if request.after:
        row["after"] = request.after
    if request.adapter_rank:
        row["adapter_rank"] = request.adapter_rank
    for name, text in (("adapter", request.adapter), ("tenant", request.tenant), ("priority", request.priority)):
        if text:
            row[name] = text
    if (measured := request.measured) is not None:
        row["duration_ms"] = round(measured.duration_s * 1000)
        if measured.ttft_s is not None:
            row["ttft_ms"] = round(measured.ttft_s * 1000)
        if measured.cached_tokens is not None:
            row["cached_tokens"] = measured.cached_tokens
    return row


def _read(path: Path, read: Callable[[int], None]) -> Iterator[tuple[int, RecordedRequest]]:
    """Requests with the numbers of their lines."""
    unreported = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    request = _recorded_request(line)
                except (ValueError, KeyError, TypeError) as error:
                    raise TraceError(path, number, f"no line of a recording: {error!r}") from error
                unreported += len(line)
                if unreported >= _REPORT_BYTES:
                    read(unreported)
                    unreported = 0
                yield number, request
        read(unreported)
    except OSError as error:
        raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from error


def _recorded_request(line: bytes) -> RecordedRequest:
    row = orjson.loads(line)
    request = RecordedRequest(
        int(row["timestamp"]),
        int(row["input_length"]),
        int(row["output_length"]),
        tuple(map(int, row["hash_ids"])),
        int(row["block_tokens"]),
        str(row["salt"]),
        int(row.get("slo_ttft_ms") or 0),
        tenant=str(row.get("tenant") or ""),
        priority=str(row.get("priority") or ""),
        adapter=str(row.get("adapter") or ""),
        session=str(row.get("session_id") or ""),
        duration_ms=int(row.get("duration_ms", -1)),
        ttft_ms=int(row.get("ttft_ms", -1)),
        cached_tokens=int(row.get("cached_tokens", -1)),
    )
    if min(request.input_tokens, request.block_tokens) < 1 or min(request.output_tokens, request.timestamp_ms) < 0:
        raise ValueError("a length or time is out of range")
    return request


def _as_trace(recorded: Iterable[RecordedRequest], block_tokens: int) -> Iterator[TraceRequest]:
    """Blocks of text are cut by bytes, so a prompt may have a block more or less than its tokens ask for: it is cut,
    or filled up with blocks of its own. A turn of a run that came after the answer before it comes a think time after
    that answer in the trace, too: where answers come later, so does it."""
    numbers: dict[int, int] = {}
    fresh = count()
    start_ms: int | None = None
    answered_ms: dict[str, int] = {}
    for request in recorded:
        start_ms = request.timestamp_ms if start_ms is None else start_ms
        blocks = -(-request.input_tokens // block_tokens)
        ids = []
        for block_hash in request.hashes[:blocks]:
            if block_hash not in numbers:
                numbers[block_hash] = next(fresh)
            ids.append(numbers[block_hash])
        ids += [next(fresh) for _ in range(blocks - len(ids))]
        arrival_s = (request.timestamp_ms - start_ms) / 1000
        slo_s = request.slo_ttft_ms / 1000 or None
        think_ms = request.timestamp_ms - answered_ms[request.session] if request.session in answered_ms else -1
        if request.session and request.duration_ms >= 0:
            ended_ms = request.timestamp_ms + request.duration_ms
            answered_ms[request.session] = max(ended_ms, answered_ms.get(request.session, ended_ms))
        yield TraceRequest(
            arrival_s, request.input_tokens, request.output_tokens, tuple(ids), slo_s,
            tenant=request.tenant, priority=request.priority, adapter=request.adapter, session=request.session,
            think_s=think_ms / 1000 if think_ms >= 0 else None, measured=request.measured,
        )  # fmt: skip
