"""The plan of a batch: its lines, checked, in the order in which they are run.

Lines whose prompts begin alike are run one after the other, so that an instance computes the common beginning once. The
plan is a file of entries of equal length, so that a replica that runs a range reads that part of it alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from dualmap.api_bodies.batch_lines import BadLineError, doubled_id, read_line
from dualmap.scheduling.batches.batch import LineError
from dualmap.scheduling.values import value

MOST_ERRORS: Final = 100
"""Errors of an input file that its client is shown."""
ALIKE_BYTES: Final = 1024
"""Prompts that are equal up to here are run one after the other."""
_PROMPTS: Final = ("messages", "prompt", "input")
_ENTRY: Final = struct.Struct("<QII")
ENTRY_BYTES: Final = _ENTRY.size


@value
class PlannedLine:
    """Where a line is in the input file, and its number there, counted from 1."""

    offset: int
    size_bytes: int
    number: int


class BadInputError(Exception):
    """The input file cannot be run."""

    def __init__(self, errors: Sequence[LineError]) -> None:
        super().__init__(errors[0].message)
        self.errors = tuple(errors)


def plan_of(source: BinaryIO, endpoint: str, *, most_lines: int, most_line_bytes: int) -> tuple[bytes, int]:
    """The plan of an input file, and the number of its lines. Blocks; keeps about 200 bytes for each line.

    Raises:
        BadInputError: it has errors, by line.
    """
    errors: list[LineError] = []
    ids = set[bytes]()
    groups = dict[int, int]()
    """Prompts by how they begin, in the order of their first lines."""
    planned: list[tuple[int, PlannedLine]] = []
    for number, offset, text in _lines(source, most_line_bytes):
        if len(planned) >= most_lines:
            errors.append(LineError("too_many_tasks", f"the file has more than {most_lines} requests; divide it"))
            break
        try:
            if len(text) > most_line_bytes:
                message = f"the line is over {most_line_bytes} bytes, the most that a request may have"
                raise BadLineError(LineError("line_too_long", message, number))
            line = read_line(text, endpoint, number)
            if (digest := xxh3_128_digest(line.custom_id.encode("utf-8", "surrogatepass"))) in ids:
                raise BadLineError(doubled_id(line.custom_id, number))
        except BadLineError as bad:
            errors.append(bad.error)
            if len(errors) >= MOST_ERRORS:
                break
            continue
        ids.add(digest)
        group = groups.setdefault(_beginning(line.body), len(groups))
        planned.append((group, PlannedLine(offset, len(text), number)))
    if not planned and not errors:
        errors.append(LineError("empty_file", "the input file has no requests"))
    if errors:
        raise BadInputError(errors)
    planned.sort(key=lambda each: each[0])
    return b"".join([_ENTRY.pack(line.offset, line.size_bytes, line.number) for _, line in planned]), len(planned)


def _lines(source: BinaryIO, most_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not blank, with their numbers and offsets; of one that is too long, its beginning."""
    number = offset = 0
    while piece := source.readline(most_line_bytes + 2):
        number, begins = number + 1, offset
        offset += len(piece)
        line = piece
        while not piece.endswith(b"\n") and (piece := source.readline(most_line_bytes)):
            offset += len(piece)
        text = line.strip()
        if text:
            yield number, begins + line.index(text[:1]), text


def _beginning(body: dict[str, Any]) -> int:
    prompt = next((body[name] for name in _PROMPTS if name in body), None)
    return xxh3_64_intdigest(orjson.dumps((body.get("model"), prompt))[:ALIKE_BYTES])


def lines_of(plan: bytes) -> list[PlannedLine]:
    """The lines of a part of a plan."""
    return [PlannedLine(*entry) for entry in _ENTRY.iter_unpack(plan)]
