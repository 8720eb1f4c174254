"""The background work of one replica on batches: it claims tasks, and does them.

Every replica runs this, and none leads: a claim in the store says who does what, and a replica that dies loses its
claims when their leases end. A range is written to storage first and reported then, in one step that checks the claim.
What was written and not reported is never read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dualmap.router.batches.cleaner import Cleaner
from dualmap.router.batches.line_runner import LineRunner
from dualmap.router.batches.new_ids import new_file_id
from dualmap.router.batches.plan import BadInputError, plan_of
from dualmap.router.batches.range_files import expired_line, join_parts, planned_range, write_part
from dualmap.router.batches.room import LineRoom
from dualmap.router.batches.service import Batches
from dualmap.router.batches.storage import file_name, plan_name
from dualmap.router.http.plane import DataPlane
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.batches.batch import RANGE_LINES, Batch, LineError, RangeDone, Status
from dualmap.scheduling.batches.slack import in_turn, next_range
from dualmap.scheduling.batches.window import Delay, Outlook, Pace, outlook
from dualmap.statestore.batches.batch_book import END, PLAN, Claim, FileRecord
from dualmap.statestore.errors import StoreError

_log = logging.getLogger(__name__)

POLL_S: Final = 0.5
LEASE_MS: Final = 10_000
RENEWED_EVERY_S: Final = 3.0
MOST_RANGES: Final = 256
"""Ranges that a replica works on at a time."""
OUTPUT_PURPOSE: Final = "batch_output"

_Task = tuple[str, str]
"""A batch, and the task of it."""


class BatchRunner:
    """``run`` until cancelled; then its claims are given back."""

    def __init__(self, runtime: Runtime, plane: DataPlane, batches: Batches) -> None:
        self._runtime = runtime
        self._batches = batches
        self._storage = batches.storage
        self._settings = batches.settings
        self._most_line_bytes = plane.settings.max_body_bytes
        self._book = batches.book
        self._clock = runtime.context.clock
        self._owner = runtime.context.replica_id
        self._claims: dict[_Task, Claim] = {}
        self._tasks: dict[_Task, asyncio.Task[None]] = {}
        self._expired: frozenset[str] = frozenset()
        self._cancelled: frozenset[str] = frozenset()
        """Batches that begin no more lines."""
        self._paces: dict[str, Pace] = {}
        self._metrics = plane.metrics
        self._done: dict[str, frozenset[int]] = {}
        """Ranges that were done when they were last read, by batch: no more than are done."""
        self._room = LineRoom(runtime, batches.book, lambda: bool(self._tasks))
        self._lines = LineRunner(plane, self._storage, self._room, self._clock)

    async def run(self) -> None:
        cleaner = Cleaner(self._storage, self._book, self._clock)
        helpers = [asyncio.create_task(each()) for each in (self._room.run, self._renew_all, cleaner.run)]
        try:
            while True:
                if not self._runtime.context.draining:
                    try:
                        await self._look_around()
                    except StoreError as error:
                        _log.debug("batches wait for the store: %s", error)
                await self._clock.sleep(POLL_S)
        finally:
            tasks = [*helpers, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # what there is to do -------------------------------------------------------------------------------------
    async def _look_around(self) -> None:
        """Begin what can be begun, in turn by tenants."""
        listed = await self._book.open()
        found = [await self._book.batch(tenant, batch_id) for batch_id, tenant in listed.items()]
        now_s = await self._book.now_s()
        under_way = Counter(listed[batch_id] for batch_id, _ in self._tasks if batch_id in listed)
        weights = {name: tenant.weight for name, tenant in self._runtime.tenants.tenants.items() if name in under_way}
        batches = in_turn(filter(None, found), under_way, weights)
        self._cancelled = frozenset([each.batch_id for each in batches if each.status is Status.CANCELLING])
        self._expired = frozenset([each.batch_id for each in batches if each.expires_s <= now_s])
        self._done = {each.batch_id: self._done.get(each.batch_id, frozenset()) for each in batches}
        self._paces = {each.batch_id: self._paces.get(each.batch_id) or Pace() for each in batches}
        outlooks: dict[str, Outlook] = {}
        for batch in batches:
            outlooks[batch.batch_id] = await self._advance(batch, now_s)
        self._give_late(outlooks)

    def _give_late(self, outlooks: Mapping[str, Outlook]) -> None:
        """Have lines of batches that would be late run as ordinary requests, and report these batches."""
        self._batches.outlooks = outlooks
        delays = Counter(each.delay for each in outlooks.values() if each.delay is not None)
        for delay in Delay:
            self._metrics.late_batches.labels(delay).set(delays[delay])
        replicas = self._room.replicas
        self._room.late = {name: -(-each.needed // replicas) for name, each in outlooks.items() if each.needed}

    def _ends(self, batch_id: str) -> bool:
        return batch_id in self._cancelled or batch_id in self._expired

    async def _advance(self, batch: Batch, now_s: int) -> Outlook:
        """Begin what can be begun of a batch; returns its forecast."""
        if batch.status is Status.VALIDATING:
            await self._begin(batch, PLAN, lambda _: self._plan(batch))
            return Outlook()
        count, claimed = await self._book.ranges_done(batch), await self._book.claims(batch)
        ends = self._ends(batch.batch_id) or batch.status is Status.FINALIZING
        if count >= batch.ranges or (ends and not claimed - {END}):
            await self._begin(batch, END, lambda _: self._end(batch))
        elif not ends:
            await self._begin_ranges(batch, count, claimed)
        return self._outlook(batch, count, now_s)

    def _outlook(self, batch: Batch, ranges_done: int, now_s: int) -> Outlook:
        pace, lines = self._paces[batch.batch_id], self._lines
        if batch.status is Status.IN_PROGRESS:
            pace.note(now_s, ranges_done)
        return outlook(
            batch, ranges_done, pace.lines_per_s(batch.expires_s - batch.created_s), now_s,
            line_s=lines.line_s,
            waiting=self._room.has_waiting(lines.pool_of(batch, 0)),
            refused=lines.refused[batch.batch_id] > 0,
            failing=lines.failing[batch.batch_id] > 0,
        )  # fmt: skip

    async def _begin_ranges(self, batch: Batch, count: int, claimed: frozenset[str]) -> None:
        """Have each instance for which fewer lines than a range wait here run a further range of its part."""
        pool = self._lines.pool_of(batch, 0)
        instances = self._room.instances(pool)
        wanting = [
            (place, each) for place, each in enumerate(instances) if self._room.waiting(pool, each) < RANGE_LINES
        ]
        if not wanting or len(self._tasks) >= MOST_RANGES:
            return
        done = self._done[batch.batch_id]
        if len(done) != count:
            done = self._done[batch.batch_id] = await self._book.done(batch)
        free = [number for number in range(batch.ranges) if number not in done and str(number) not in claimed]
        for place, instance_id in wanting:
            if free and len(self._tasks) < MOST_RANGES:
                number = free.pop(next_range(free, batch.ranges, place, len(instances)))
                await self._begin(batch, str(number), partial(self._run_range, batch, number, instance_id))

    async def _begin(self, batch: Batch, task: str, do: Callable[[Claim], Coroutine[Any, Any, None]]) -> None:
        key = (batch.batch_id, task)
        if key in self._tasks:
            return
        claim = await self._book.claim(batch, task, self._owner, LEASE_MS)
        if claim is not None:
            self._claims[key] = claim
            self._tasks[key] = asyncio.create_task(self._do(key, do(claim)), name=f"batch {batch.batch_id} {task}")
            await asyncio.sleep(0)  # its lines begin to wait for room, where there is none

    async def _do(self, key: _Task, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StoreError as error:
            _log.warning("task %s of batch %s is left to others: %s", key[1], key[0], error)
        except Exception:
            _log.exception("task %s of batch %s failed, and is tried again once its claim has ended", key[1], key[0])
            self._claims.pop(key, None)
        finally:
            del self._tasks[key]
            claim = self._claims.pop(key, None)
            if claim is not None:
                await self._give_back(claim)

    async def _give_back(self, claim: Claim) -> None:
        try:
            await asyncio.shield(self._book.give_back(claim))
        except StoreError:
            return  # its lease ends by itself

    async def _renew_all(self) -> None:
        """Keep the leases of claims; the work of one that is lost ends, as another replica does it now."""
        while True:
            await self._clock.sleep(RENEWED_EVERY_S)
            for key, claim in [*self._claims.items()]:
                try:
                    stands = await self._book.renew(claim, LEASE_MS)
                except StoreError:
                    break
                if not stands and self._claims.get(key) is claim:  # else it ended meanwhile
                    del self._claims[key]
                    self._tasks[key].cancel()

    # the tasks -----------------------------------------------------------------------------------------------
    async def _plan(self, batch: Batch) -> None:
        errors: tuple[LineError, ...] = ()
        try:
            plan, lines, models = await asyncio.to_thread(self._read_input, batch)
        except BadInputError as bad:
            errors = bad.errors
        except FileNotFoundError:
            errors = (LineError("file_not_found", f"the input file {batch.input_file} is not there any more"),)
        now_s = await self._book.now_s()
        if errors:
            await self._book.change(batch, replace(batch.entered(Status.FAILED, now_s), errors=errors))
            return
        await self._storage.write(plan_name(batch.batch_id), plan)
        begun = replace(batch.entered(Status.IN_PROGRESS, now_s), lines=lines, models=models)
        if not await self._book.change(batch, begun):
            await self._storage.remove_batch(batch.batch_id)  # it was cancelled meanwhile

    def _read_input(self, batch: Batch) -> tuple[bytes, int, tuple[str, ...]]:
        with self._storage.open(file_name(batch.input_file)) as source:
            return plan_of(
                source,
                batch.endpoint,
                most_lines=self._settings.max_lines,
                most_line_bytes=self._most_line_bytes,
            )

    async def _run_range(self, batch: Batch, number: int, instance_id: str, claim: Claim) -> None:
        planned = await asyncio.to_thread(planned_range, self._storage, batch, number)
        ends = partial(self._ends, batch.batch_id)
        lines = [asyncio.create_task(self._lines.run(batch, each, instance_id, ends)) for each in planned]
        try:
            results = await asyncio.gather(*lines)
        finally:
            for each in lines:  # where one raised, the others must not run beside the next try
                each.cancel()
        answers = [each.text for each in results if each is not None and each.is_answer]
        failures = [each.text for each in results if each is not None and not each.is_answer]
        if batch.batch_id not in self._cancelled:
            unrun = [each for each, result in zip(planned, results, strict=True) if result is None]
            failures += [await asyncio.to_thread(expired_line, self._storage, batch, each) for each in unrun]
        await asyncio.to_thread(write_part, self._storage, batch, claim.token, answers, failed=False)
        await asyncio.to_thread(write_part, self._storage, batch, claim.token, failures, failed=True)
        await self._book.finish_range(batch, claim, RangeDone(claim.token, len(answers), len(failures)))

    async def _end(self, batch: Batch) -> None:
        """Write the files of answers and errors, and close the batch. A batch that is found in this state was begun to
        be closed by a replica that died: its files have other names, and nothing leads to them."""
        if batch.status is Status.IN_PROGRESS:
            finalizing = batch.entered(Status.FINALIZING, await self._book.now_s())
            if not await self._book.change(batch, finalizing):
                return
            batch = finalizing
        progress = await self._book.progress(batch)
        is_cancelled = batch.status is Status.CANCELLING
        expired = not is_cancelled and not progress.is_whole(batch)
        output, failed = new_file_id(), new_file_id()
        join = partial(join_parts, self._storage, batch, progress)
        output_bytes, _ = await asyncio.to_thread(join, output, failed=False)
        failed_bytes, unrun = await asyncio.to_thread(join, failed, failed=True, expired=expired)
        now_s = await self._book.now_s()
        files = [
            FileRecord(
                file_id=file_id,
                tenant=batch.tenant,
                name=f"{batch.batch_id}_{what}.jsonl",
                purpose=OUTPUT_PURPOSE,
                size_bytes=size_bytes,
                created_s=now_s,
            )
            for file_id, what, size_bytes in ((output, "output", output_bytes), (failed, "error", failed_bytes))
            if size_bytes
        ]
        has = {each.file_id for each in files}
        ended = Status.CANCELLED if is_cancelled else Status.EXPIRED if expired else Status.COMPLETED
        over = replace(
            batch.entered(ended, now_s),
            output_file=output if output in has else "",
            error_file=failed if failed in has else "",
            completed=progress.completed,
            failed=progress.failed + unrun,
        )
        is_closed = await self._book.change(batch, over, files)
        await self._storage.remove([file_name(each) for each in (output, failed) if not is_closed or each not in has])
        if is_closed:
            await self._storage.remove_batch(batch.batch_id)
