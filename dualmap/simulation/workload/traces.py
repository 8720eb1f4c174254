"""Request traces: when requests arrive, how long they are and which prefixes they share; no text.

Three formats are read:

* Mooncake JSONL (FAST'25 release): one object a line with ``timestamp`` (ms), ``input_length``,
  ``output_length`` (tokens) and ``hash_ids``, one id per block; equal ids mean equal prefixes up to and
  including that block. The last block may be partial.
* The project's own recording (``dualmap record``): the same, with ``block_tokens`` on every line.
  Both may have ``slo_ttft_ms``, the TTFT SLO of a request, ``tenant`` and ``priority``, who it is for and the name of
  its priority class, ``adapter``, the name of the adapter that computes it, and ``adapter_rank``. A turn of a session
  has ``session_id`` and, except for the first one, ``delay``: the ms between the end of the answer before it and the
  turn. It waits for further sessions if ``after`` lists their ids. ``timestamp`` is then its time in an open loop, and
  may be missing.
  A recorded request has ``duration_ms``, and ``ttft_ms`` and ``cached_tokens`` where they were seen: how it was served.
* Azure LLM inference CSV (2023 and 2024): ``TIMESTAMP,ContextTokens,GeneratedTokens``; nothing is shared.

Every reader checks every line and raises TraceError with the file, the line and the reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from pathlib import Path

import orjson

from dualmap.simulation.errors import TraceError

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class Measured:
    """How a recorded request was served, by the fleet's own clock."""

    duration_s: float
    """Time from its arrival to the end of its answer."""
    ttft_s: float | None = None
    """None: its first token was not seen, as that of an answer which did not stream."""
    cached_tokens: int | None = None
    """Prompt tokens that its instance found in its cache; None: it did not say."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the start of the trace."""
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One id per block; equal ids in two requests mean that they agree up to and including that block."""
    slo_ttft_s: float | None = None
    """The TTFT SLO of the request, as a client sends it with ``x-slo-ttft-ms``; None: it leaves it to the fleet."""
    _: KW_ONLY
    tenant: str = ""
    """The tenant that it is for; empty: none."""
    priority: str = ""
    """The name of its priority class; empty: that of its tenant."""
    session: str = ""
    """The session that it is a turn of; empty: none."""
    think_s: float | None = None
    """Time between the end of the answers that it waits for and its arrival; None: it arrives at ``arrival_s``, and so
    if the trace has none of those answers. It waits for the turn before it in its session."""
    after: tuple[str, ...] = ()
    """Further sessions: it waits for the last turn before it of each."""
    adapter: str = ""
    """The adapter that computes it; empty: none. Prefixes of two adapters have no id in common."""
    adapter_rank: int = 0
    """The rank of that; 0: not known."""
    measured: Measured | None = None
    """How it was served; None: it was not recorded, or by a release that did not measure it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, and the block size their ids were made with."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate; infinite when everything arrives at once."""
        span_s = self.requests[-1].arrival_s - self.requests[0].arrival_s
        return len(self.requests) / span_s if span_s > 0 else float("inf")

    @property
    def has_think_times(self) -> bool:
        """Whether any request comes a think time after answers."""
        return any(request.think_s is not None for request in self.requests)

    def window(self, start: int, count: int | None = None) -> Trace:
        """``count`` requests (None: all) from number ``start`` on, at their own times since the first of them.

        Raises:
            TraceError: the trace ends before ``start``.
        """
        if start >= len(self.requests):
            raise TraceError(self.name, None, f"has {len(self.requests)} requests, none from number {start} on")
        return replace(self, requests=_from_zero(self.requests[start : None if count is None else start + count]))

    def capped(self, max_input_tokens: int) -> Trace:
        """The trace with every prompt cut to at most ``max_input_tokens``."""
        return replace(self, requests=tuple(_capped(r, max_input_tokens, self.block_tokens) for r in self.requests))

    def at_rate(self, rate_per_s: float) -> Trace:
        """The trace starting at 0 with its arrival times stretched or squeezed to a mean rate. Think times stay.

        Raises:
            TraceError: all requests arrive at once, so that no factor gives the rate.
        """
        if self.rate_per_s == float("inf"):
            raise TraceError(self.name, None, "all requests arrive at once: the trace cannot be scaled to a rate")
        start_s, factor = self.requests[0].arrival_s, self.rate_per_s / rate_per_s
        return replace(
            self, requests=tuple(replace(r, arrival_s=(r.arrival_s - start_s) * factor) for r in self.requests)
        )


def _from_zero(requests: Sequence[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The requests with their times since the first of them."""
    start_s = requests[0].arrival_s
    return tuple(replace(request, arrival_s=request.arrival_s - start_s) for request in requests)


def _capped(request: TraceRequest, max_input_tokens: int, block_tokens: int) -> TraceRequest:
    if request.input_tokens <= max_input_tokens:
        return request
    blocks = -(-max_input_tokens // block_tokens)
    return replace(request, input_tokens=max_input_tokens, hash_ids=request.hash_ids[:blocks])


def read_trace(path: str | Path, block_tokens: int | None = None) -> Trace:
    """Read a trace of any known format, recognized by its first line.

    ``block_tokens`` is for JSONL that does not carry its block size (512, Mooncake's, when None), and the
    block size that Azure requests are cut into.
    """
    source = Path(path)
    first = next(iter(_lines(source)), (1, b""))[1]
    if first.decode(errors="replace").lstrip("\ufeff").startswith(AZURE_COLUMNS[0]):
        return Trace(source.name, block_tokens or MOONCAKE_BLOCK_TOKENS, _azure_requests(source, block_tokens))
    recorded = _recorded_block_tokens(first)
    if recorded and block_tokens and recorded != block_tokens:
        raise TraceError(source, 1, f"recorded with {recorded} tokens a block, but {block_tokens} were asked for")
    size = recorded or block_tokens or MOONCAKE_BLOCK_TOKENS
    return Trace(source.name, size, tuple(read_mooncake(source, size)))


def read_mooncake(path: str | Path, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> list[TraceRequest]:
    """Read Mooncake JSONL (and the project's recording, whose lines have one field more); the first arrives at 0."""
    source = Path(path)
    requests: list[TraceRequest] = []
    for number, line in _lines(source):
        try:
            request = _mooncake_request(line, block_tokens, requests[-1].arrival_s if requests else 0.0)
        except ValueError as error:
            raise TraceError(source, number, str(error)) from error
        _append_in_order(requests, request, source, number)
    return [*_from_zero(_not_empty(requests, source))]


def _lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1, without blank ones."""
    try:
        with source.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise TraceError(source, None, f"cannot be read: {error.strerror or error}") from error


def _append_in_order(requests: list[TraceRequest], request: TraceRequest, source: Path, number: int) -> None:
    if requests and request.arrival_s < requests[-1].arrival_s:
        raise TraceError(source, number, "arrives before the request above it: sort the trace by timestamp")
    requests.append(request)


def _not_empty(requests: list[TraceRequest], source: Path) -> list[TraceRequest]:
    if not requests:
        raise TraceError(source, None, "holds no requests")
    return requests


def _recorded_block_tokens(line: bytes) -> int | None:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    size = row.get("block_tokens") if isinstance(row, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def _mooncake_request(line: bytes, block_tokens: int, before_s: float) -> TraceRequest:
    """Parse one line, which follows one at ``before_s``; ValueError with the reason when it is broken."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    think_s = _number(row, "delay", least=0) / 1000 if row.get("delay") is not None else None
    if think_s is not None and row.get("timestamp") is None:
        arrival_s = before_s
    else:
        arrival_s = _number(row, "timestamp", least=0) / 1000
    input_tokens = _integer(row, "input_length", least=1)
    output_tokens = _integer(row, "output_length", least=0)
    hash_ids = row.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(block) is int and block >= 0 for block in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers, 0 or more")
    _check_block_count(len(hash_ids), input_tokens, block_tokens)
    slo_ttft_s = _number(row, "slo_ttft_ms", least=1) / 1000 if row.get("slo_ttft_ms") is not None else None
    tenant, priority = (_text(row, name) for name in ("tenant", "priority"))
    session, after = _session(row.get("session_id", "")), row.get("after", [])
    if think_s is not None and not session:
        raise ValueError("a line with delay is a turn of a session: it needs session_id")
    if not isinstance(after, list):
        raise ValueError("after must be a list of session ids")
    return TraceRequest(
        arrival_s, input_tokens, output_tokens, tuple(hash_ids), slo_ttft_s, tenant=tenant, priority=priority,
        session=session, think_s=think_s, after=tuple(map(_session, after)),
        adapter=_text(row, "adapter"), measured=_measured(row),
        adapter_rank=_integer(row, "adapter_rank", least=0) if "adapter_rank" in row else 0,
    )  # fmt: skip


def _measured(row: dict[str, object]) -> Measured | None:
    if row.get("duration_ms") is None:
        return None
    ttft_ms = _number(row, "ttft_ms", least=0) if row.get("ttft_ms") is not None else None
    cached = _integer(row, "cached_tokens", least=0) if row.get("cached_tokens") is not None else None
    return Measured(_number(row, "duration_ms", least=0) / 1000, None if ttft_ms is None else ttft_ms / 1000, cached)


def _check_block_count(blocks: int, input_tokens: int, block_tokens: int) -> None:
    """A partial last block may be listed or not; any other count means another block size."""
    if not max(1, input_tokens // block_tokens) <= blocks <= -(-input_tokens // block_tokens):
        raise ValueError(
            f"{blocks} hash_ids do not fit input_length {input_tokens} at {block_tokens} tokens a block "
            "(was the trace made with another block size?)"
        )


def _number(row: dict[str, object], name: str, least: int) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
    return value


def _integer(row: dict[str, object], name: str, least: int) -> int:
    value = _number(row, name, least)
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, found {value}")
    return value


def _text(row: dict[str, object], name: str) -> str:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{name} must be a text, found {value!r}")
    return value or ""


def _session(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"session ids must be texts or whole numbers, found {value!r}")
    return str(value)


def _azure_requests(source: Path, block_tokens: int | None) -> tuple[TraceRequest, ...]:
    """Every block id is unique, because the trace knows no prefixes."""
    size = block_tokens or MOONCAKE_BLOCK_TOKENS
    requests: list[TraceRequest] = []
    start: datetime | None = None
    next_id = 0
    for number, line in _lines(source):
        row = next(csv.reader([line.decode("utf-8-sig", errors="replace")]))
        if number == 1:
            if tuple(cell.strip() for cell in row) != AZURE_COLUMNS:
                raise TraceError(source, 1, f"the header must be {','.join(AZURE_COLUMNS)}")
            continue
        try:
            arrival, input_tokens, output_tokens = _azure_row(row)
            start = start or arrival
            arrival_s = (arrival - start).total_seconds()
        except (ValueError, TypeError) as error:
            raise TraceError(source, number, str(error)) from error
        blocks = -(-input_tokens // size)
        ids = tuple(range(next_id, next_id + blocks))
        next_id += blocks
        _append_in_order(requests, TraceRequest(arrival_s, input_tokens, output_tokens, ids), source, number)
    return tuple(_not_empty(requests, source))


def _azure_row(row: Sequence[str]) -> tuple[datetime, int, int]:
    if len(row) != len(AZURE_COLUMNS):
        raise ValueError(f"expected {len(AZURE_COLUMNS)} columns, found {len(row)}")
    input_tokens, output_tokens = int(row[1]), int(row[2])
    if input_tokens < 1 or output_tokens < 0:
        raise ValueError("ContextTokens must be at least 1 and GeneratedTokens at least 0")
    return datetime.fromisoformat(row[0].strip()), input_tokens, output_tokens
