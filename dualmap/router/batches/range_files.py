"""Lines and parts of a batch in its storage. Everything here blocks, and is for threads."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import BinaryIO, Final

from dualmap.api_bodies.batch_lines import BatchLine, failed_line, read_line
from dualmap.router.batches.plan import ENTRY_BYTES, PlannedLine, lines_of
from dualmap.router.batches.storage import BatchStorage, file_name, part_name, plan_name
from dualmap.scheduling.batches.batch import Batch, Progress

_EXPIRED: Final = "the completion window was over before this request could be run"


def planned_range(storage: BatchStorage, batch: Batch, number: int) -> list[PlannedLine]:
    """Where the lines of a range are."""
    places = batch.lines_of(number)
    with storage.open(plan_name(batch.batch_id)) as plan:
        plan.seek(places.start * ENTRY_BYTES)
        return lines_of(plan.read(len(places) * ENTRY_BYTES))


def read_planned(storage: BatchStorage, batch: Batch, planned: PlannedLine) -> BatchLine:
    """One line."""
    with storage.open(file_name(batch.input_file)) as source:
        source.seek(planned.offset)
        return read_line(source.read(planned.size_bytes), batch.endpoint, planned.number)


def line_id_of(batch: Batch, planned: PlannedLine) -> str:
    """The id of a line, which does not depend on the replica that runs it, or on how often it is run."""
    return f"batch_req_{batch.batch_id.removeprefix('batch_')}_{planned.number}"


def expired_line(storage: BatchStorage, batch: Batch, planned: PlannedLine) -> bytes:
    """The error of a line that was not run in time."""
    custom_id = read_planned(storage, batch, planned).custom_id
    return failed_line(line_id_of(batch, planned), custom_id, "batch_expired", _EXPIRED)


def write_part(storage: BatchStorage, batch: Batch, part: str, lines: Sequence[bytes], *, failed: bool) -> None:
    """Write the answers of a range, or its errors."""
    if lines:
        with storage.open_new(part_name(batch.batch_id, part, failed=failed)) as file:
            file.writelines(lines)


def join_parts(
    storage: BatchStorage, batch: Batch, progress: Progress, file_id: str, *, failed: bool, expired: bool = False
) -> tuple[int, int]:
    """Write the file of answers, or of errors, out of the parts of the ranges that are done; with ``expired`` the lines
    of all other ranges are errors. Returns its bytes, and the lines that are in no part."""
    unrun = 0
    with storage.open_new(file_name(file_id)) as file:
        for number in range(batch.ranges):
            done = progress.done.get(number)
            if done is not None:
                if done.failed if failed else done.completed:
                    _append(storage, part_name(batch.batch_id, done.part, failed=failed), file)
            elif failed and expired:
                planned = planned_range(storage, batch, number)
                file.writelines(expired_line(storage, batch, each) for each in planned)
                unrun += len(planned)
        return file.tell(), unrun


def _append(storage: BatchStorage, name: str, file: BinaryIO) -> None:
    with storage.open(name) as part:
        shutil.copyfileobj(part, file)
