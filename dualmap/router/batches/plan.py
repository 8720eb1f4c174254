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
MOST_MODELS: Final = 64
"""Different models that the lines of a batch may name."""
MODELS_BYTES: Final = 8 << 10
"""Bytes of the names of these, all together: they are in the batch's record, which replicas read again and again."""
LINES_FOR_EACH: Final = 4
"""Lines of a file for each request that it may have, blank ones among them."""
ALIKE_BYTES: Final = 1024
"""Prompts that are equal up to here are run one after the other."""
_PROMPTS: Final = ("messages", "prompt", "input")
_ENTRY: Final = struct.Struct("<QIII")
ENTRY_BYTES: Final = _ENTRY.size


@value
class PlannedLine:
    """Where a line is in the input file, and its number there, counted from 1."""

    offset: int
    size_bytes: int
    number: int
    model: int = 0
    """The place of its model among those of the batch."""


class BadInputError(Exception):
    """The input file cannot be run."""

    def __init__(self, errors: Sequence[LineError]) -> None:
        super().__init__(errors[0].message)
        self.errors = tuple(errors)


def plan_of(
    source: BinaryIO, endpoint: str, *, most_lines: int, most_line_bytes: int
) -> tuple[bytes, int, tuple[str, ...]]:
    """The plan of an input file, the number of its lines, and their models. Blocks; keeps about 200 bytes for each
    line.

    Raises:
        BadInputError: it has errors, by line.
    """
    errors: list[LineError] = []
    ids = set[bytes]()
    groups = dict[int, int]()
    """Prompts by how they begin, in the order of their first lines."""
    models, model_bytes = dict[str, int](), 0
    planned: list[tuple[int, PlannedLine]] = []
    for number, offset, text in _lines(source, most_line_bytes, LINES_FOR_EACH * most_lines):
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
            beginning, model = _beginning(line.body, number), line.body.get("model")
            name = model if isinstance(model, str) else ""
            if name not in models:
                model_bytes += len(name.encode())
                if len(models) >= MOST_MODELS or model_bytes > MODELS_BYTES:
                    bound = f"{MOST_MODELS} models, or their names over {MODELS_BYTES} bytes"
                    message = f"the file has requests for more than {bound}; divide it"
                    raise BadLineError(LineError("too_many_models", message, number, "body.model"))
        except BadLineError as bad:
            errors.append(bad.error)
            if len(errors) >= MOST_ERRORS:
                break
            continue
        ids.add(digest)
        group = groups.setdefault(beginning, len(groups))
        planned.append((group, PlannedLine(offset, len(text), number, models.setdefault(name, len(models)))))
    if not planned and not errors:
        errors.append(LineError("empty_file", "the input file has no requests"))
    if errors:
        raise BadInputError(errors)
    planned.sort(key=lambda each: each[0])
    entries = [_ENTRY.pack(line.offset, line.size_bytes, line.number, line.model) for _, line in planned]
    return b"".join(entries), len(planned), tuple(models)


def _lines(source: BinaryIO, most_line_bytes: int, most: int) -> Iterator[tuple[int, int, bytes]]:
    """The lines that are not blank, with their numbers and offsets; of one that is too long, its beginning.

    Raises:
        BadInputError: it has more than ``most``, with those that are blank.
    """
    number = offset = 0
    while piece := source.readline(most_line_bytes + 2):
        number, begins = number + 1, offset
        if number > most:
            raise BadInputError([LineError("too_many_lines", f"the file has more than {most} lines, with blank ones")])
        offset += len(piece)
        line = piece
        while not piece.endswith(b"\n") and (piece := source.readline(most_line_bytes)):
            offset += len(piece)
        text = line.strip()
        if text:
            yield number, begins + line.index(text[:1]), text


def _beginning(body: dict[str, Any], number: int) -> int:
    """The hash of how the prompt of a line begins.

    Raises:
        BadLineError: the body cannot be written, as it has to be to be sent.
    """
    rest = {**body}
    prompt = rest.pop(next((name for name in _PROMPTS if name in body), _PROMPTS[0]), None)
    try:
        begins = orjson.dumps((body.get("model"), prompt))[:ALIKE_BYTES]
        orjson.dumps(rest)
    except TypeError:
        raise BadLineError(LineError("invalid_json_line", "body is nested too deeply", number, "body")) from None
    return xxh3_64_intdigest(begins)


def lines_of(plan: bytes) -> list[PlannedLine]:
    """The lines of a part of a plan."""
    return [PlannedLine(*entry) for entry in _ENTRY.iter_unpack(plan)]
