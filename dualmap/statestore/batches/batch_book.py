"""The book of files and batches: what there is, what is under way, and by whom.

Only positions and states are here; the bytes of files lie in the storage of the replicas
(``router.batches.storage``). A replica that works on a batch claims a *task* of it: a range of lines, its plan, or its
end. A claim has a lease, so that the task of a replica that died is claimed by another one, and its result counts only
as long as the claim stands and the batch is in the state that it was claimed in. So each range is reported once,
whichever replica was killed, and nothing is added to a batch that is over.

The lease stands beside the claim, which never changes: to renew it interferes with no result.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Final

import msgspec

from dualmap.scheduling.batches.batch import Batch, Progress, RangeDone, Status
from dualmap.statestore.keys import FleetKeys
from dualmap.statestore.leases import lease_runs
from dualmap.statestore.pool.calls import Calls, Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.readable import checks_replies, each_readable

PLAN: Final = "plan"
"""The task of checking the input file and of dividing it into ranges."""
END: Final = "end"
"""The task of writing the files of answers and errors."""
REPORTED_FOR_MS: Final = 3000
"""Time for which a replica's report of its lines counts."""
KEPT_OVER: Final = 1000
"""Batches of a tenant that are over and remembered, those that were made last."""
KEPT_BYTES: Final = 4 << 20
"""Bytes of their records at most."""
MOST_UNNAMED: Final = 1000
"""Files and batches that no record names of which the book notes that, at a time."""
_CLEANED_NEXT: Final = ":next"
"""The field of ``batches_unnamed`` with the time of the next round."""
_LEASE: Final = ":lease"
"""Behind the name of a task: the field with the lease of its claim."""

_encode: Final = msgspec.json.Encoder(order="deterministic").encode
_batch_from: Final = msgspec.json.Decoder(Batch).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of a tenant."""

    file_id: str
    tenant: str
    name: str
    purpose: str
    size_bytes: int
    created_s: int


_file_from: Final = msgspec.json.Decoder(FileRecord).decode


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to do one task of a batch, while its lease runs."""

    batch_id: str
    task: str
    token: str
    """Another one for each claim."""
    text: bytes
    """The claim as the book has it."""


class BatchBook(Changes):
    """The book of a fleet."""

    def __init__(self, keys: FleetKeys, calls: Calls) -> None:
        super().__init__(keys, calls)
        self._names: Final = keys

    # files -------------------------------------------------------------------------------------------------------
    @checks_replies
    async def put_file(self, file: FileRecord) -> None:
        await self._make(Change(self._files_put([file])))

    def _files_put(self, files: Sequence[FileRecord]) -> list[Command]:
        keys, commands = self._names, list[Command]()
        for each in files:
            commands.append(("HSET", keys.batch_files(each.tenant), each.file_id, _encode(each)))
            commands.append(("HSET", keys.batch_owners, each.tenant, "1"))
        return commands

    @checks_replies
    async def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """A file of the tenant; None for another one's, as for one that does not exist."""
        text = await self._calls.command("HGET", self._names.batch_files(tenant), file_id)
        return None if text is None else _file_from(text)

    @checks_replies
    async def files(self, tenant: str) -> Sequence[FileRecord]:
        """The files of a tenant, the latest first."""
        found = pairs_from(await self._calls.command("HGETALL", self._names.batch_files(tenant)))
        read = each_readable(found, lambda _, text: _file_from(text)).values()
        return sorted(read, key=lambda each: (each.created_s, each.file_id), reverse=True)

    @checks_replies
    async def remove_file(self, tenant: str, file_id: str) -> bool:
        made = await self._make(Change((("HDEL", self._names.batch_files(tenant), file_id),)))
        return made is not None and bool(made[1])

    # what storage has and no record names ------------------------------------------------------------------------
    @checks_replies
    async def begin_cleaning(self, every_s: int) -> bool:
        """Whether the caller looks for such files now: of all replicas one does, once in so many seconds."""
        key, now_s = self._names.batches_unnamed, await self.now_s()
        former = await self._calls.command("HGET", key, _CLEANED_NEXT)
        if former is not None and int(former) > now_s:
            return False
        begun = Change((("HSET", key, _CLEANED_NEXT, now_s + every_s),), ((key, _CLEANED_NEXT, former),))
        return await self._make(begun) is not None

    @checks_replies
    async def unnamed(self, found: Iterable[str]) -> Mapping[str, int]:
        """Those of these ids of files and batches that no record names, of batches those that are not open, and since
        when that is known, in seconds since 1970. The book notes at most ``MOST_UNNAMED`` of them."""
        key, now_s = self._names.batches_unnamed, await self.now_s()
        named = await self._named()
        missing = [*islice((each for each in sorted(found) if each not in named), MOST_UNNAMED)]
        former = each_readable(
            pairs_from(await self._calls.command("HGETALL", key)), lambda _, text: int(text.decode())
        )
        former.pop(_CLEANED_NEXT, None)
        since = {each: former.get(each, now_s) for each in missing}
        gone = former.keys() - since.keys()
        commands: list[Command] = [("HSET", key, *new) for new in since.items() if new[0] not in former]
        commands += [("HDEL", key, *sorted(gone))] if gone else []
        if commands:
            await self._make(Change(commands))
        return since

    async def _named(self) -> frozenset[str]:
        named = {*await self.open()}
        for tenant in await self._calls.command("HKEYS", self._names.batch_owners):
            files = await self._calls.command("HKEYS", self._names.batch_files(tenant.decode(errors="replace")))
            named.update(each.decode(errors="replace") for each in files)
        return frozenset(named)

    # batches -----------------------------------------------------------------------------------------------------
    @checks_replies
    async def create(self, batch: Batch) -> None:
        """Enter a batch. Of the tenant's that are over those are forgotten which were made long before."""
        keys = self._names
        own = keys.batches(batch.tenant)
        forgotten = _forgotten(pairs_from(await self._calls.command("HGETALL", own)))
        commands: list[Command] = [
            ("HSET", own, batch.batch_id, _encode(batch)),
            ("HSET", keys.batches_open, batch.batch_id, batch.tenant),
        ]
        commands += [("HDEL", own, *forgotten)] if forgotten else []
        await self._make(Change(commands))

    @checks_replies
    async def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """A batch of the tenant; None for another one's, as for one that does not exist."""
        text = await self._calls.command("HGET", self._names.batches(tenant), batch_id)
        return None if text is None else _batch_from(text)

    @checks_replies
    async def batches(self, tenant: str) -> Sequence[Batch]:
        """The batches of a tenant, the latest first."""
        found = pairs_from(await self._calls.command("HGETALL", self._names.batches(tenant)))
        read = each_readable(found, lambda _, text: _batch_from(text)).values()
        return sorted(read, key=lambda each: (each.created_s, each.batch_id), reverse=True)

    @checks_replies
    async def open(self) -> Mapping[str, str]:
        """The batches that are not over, with their tenants."""
        found = pairs_from(await self._calls.command("HGETALL", self._names.batches_open))
        return each_readable(found, lambda _, tenant: tenant.decode())

    @checks_replies
    async def change(self, former: Batch, new: Batch, files: Sequence[FileRecord] = ()) -> bool:
        """Write a batch as it is now, and files that belong to it; False where ``former`` does not stand any more."""
        keys, batch_id = self._names, former.batch_id
        own = keys.batches(former.tenant)
        commands: list[Command] = [("HSET", own, batch_id, _encode(new))]
        commands += self._files_put(files)
        if new.is_over:
            commands.append(("HDEL", keys.batches_open, batch_id))
            commands.append(("DEL", keys.batch_claims(batch_id), keys.batch_done(batch_id)))
        return await self._make(Change(commands, ((own, batch_id, _encode(former)),))) is not None

    @checks_replies
    async def progress(self, batch: Batch) -> Progress:
        """The ranges that are done, of a batch that is not over."""
        found = pairs_from(await self._calls.command("HGETALL", self._names.batch_done(batch.batch_id)))
        return Progress({int(number): _done_from(text) for number, text in found.items()})

    @checks_replies
    async def ranges_done(self, batch: Batch) -> int:
        """The number of ranges that are done, of a batch that is not over."""
        return int(await self._calls.command("HLEN", self._names.batch_done(batch.batch_id)))

    @checks_replies
    async def done(self, batch: Batch) -> frozenset[int]:
        """The numbers of the ranges that are done, of a batch that is not over."""
        return frozenset(map(int, await self._calls.command("HKEYS", self._names.batch_done(batch.batch_id))))

    # lines -------------------------------------------------------------------------------------------------------
    @checks_replies
    async def exchange_lines(self, replica_id: str, running: Mapping[str, int]) -> Mapping[str, int]:
        """Report the lines that run on each instance through a replica; returns those through all others together.

        The report of a replica that died counts for ``REPORTED_FOR_MS``.
        """
        key = self._names.batch_lines
        found = pairs_from(await self._calls.command("HGETALL", key))
        now_ms = await self._calls.now_ms()
        others = Counter[str]()
        gone: list[bytes] = []
        for name, text in found.items():
            reported_ms, lines = msgspec.json.decode(text)
            if now_ms - reported_ms > REPORTED_FOR_MS:
                gone.append(name)
            elif name.decode() != replica_id:
                others.update(lines)
        commands: list[Command] = [("HSET", key, replica_id, _encode((now_ms, running)))]
        commands += [("HDEL", key, *gone)] if gone else []
        await self._make(Change(commands))
        return others

    # tasks -------------------------------------------------------------------------------------------------------
    @checks_replies
    async def claims(self, batch: Batch) -> frozenset[str]:
        """The tasks of a batch whose claims stand."""
        found = pairs_from(await self._calls.command("HGETALL", self._names.batch_claims(batch.batch_id)))
        now_ms = await self._calls.now_ms()
        tasks = [name.decode() for name in found if not name.endswith(_LEASE.encode())]
        return frozenset(task for task in tasks if _runs(found.get((task + _LEASE).encode()), now_ms))

    @checks_replies
    async def claim(self, batch: Batch, task: str, owner: str, lease_ms: int) -> Claim | None:
        """Claim a task of a batch; None where another one has it, it is a range that is done, or the batch is not as
        it was any more."""
        key, lease = self._names.batch_claims(batch.batch_id), task + _LEASE
        former, former_lease = await self._calls.command("HMGET", key, task, lease)
        now_ms = await self._calls.now_ms()
        if former is not None and _runs(former_lease, now_ms):
            return None
        token = secrets.token_hex(6)
        text = _encode((owner, token))
        commands = (("HSET", key, task, text, lease, _encode((now_ms + lease_ms, lease_ms))),)
        done = (self._names.batch_done(batch.batch_id), task, None)
        standing = ((key, task, former), (key, lease, former_lease), done, self._as_read(batch))
        made = await self._make(Change(commands, standing))
        return None if made is None else Claim(batch.batch_id, task, token, text)

    @checks_replies
    async def renew(self, claim: Claim, lease_ms: int) -> bool:
        """Give a claim a new lease; False where it does not stand any more."""
        key, now_ms = self._names.batch_claims(claim.batch_id), await self._calls.now_ms()
        renewed = (("HSET", key, claim.task + _LEASE, _encode((now_ms + lease_ms, lease_ms))),)
        return await self._make(Change(renewed, ((key, claim.task, claim.text),))) is not None

    @checks_replies
    async def give_back(self, claim: Claim) -> None:
        """Let others claim a task that is not done."""
        key = self._names.batch_claims(claim.batch_id)
        gone = (("HDEL", key, claim.task, claim.task + _LEASE),)
        await self._make(Change(gone, ((key, claim.task, claim.text),)))

    @checks_replies
    async def finish_range(self, batch: Batch, claim: Claim, done: RangeDone) -> bool:
        """Report a claimed range; False where the claim does not stand any more, or the batch is ending: then nothing
        of it counts."""
        keys, number = self._names, claim.task
        claims, own = keys.batch_claims(batch.batch_id), keys.batches(batch.tenant)
        for _ in range(2):
            text = await self._calls.command("HGET", own, batch.batch_id)
            if text is None or _batch_from(text).status not in (Status.IN_PROGRESS, Status.CANCELLING):
                return False
            change = Change(
                (
                    (
                        "HSET",
                        keys.batch_done(batch.batch_id),
                        number,
                        _encode((done.part, done.completed, done.failed)),
                    ),
                    ("HDEL", claims, number, number + _LEASE),
                ),
                ((claims, number, claim.text), (own, batch.batch_id, text)),
            )
            if await self._make(change) is not None:
                return True
        return False  # its client cancels it at the same time, or the claim was lost

    @checks_replies
    async def now_s(self) -> int:
        """The store's time, seconds since 1970."""
        return await self._calls.now_ms() // 1000

    def _as_read(self, batch: Batch) -> tuple[bytes, str, bytes]:
        return self._names.batches(batch.tenant), batch.batch_id, _encode(batch)


def _forgotten(found: Mapping[bytes, bytes]) -> list[str]:
    """The batches to forget, of all that a tenant has."""
    read = each_readable(found, lambda _, text: _batch_from(text))
    over = sorted(((each.created_s, name) for name, each in read.items() if each.is_over), reverse=True)
    sizes = accumulate(len(found[name.encode()]) for _, name in over)
    kept = sum(size_bytes <= KEPT_BYTES for size_bytes in islice(sizes, KEPT_OVER))
    return [name for _, name in over[kept:]]


def _done_from(text: bytes) -> RangeDone:
    part, completed, failed = msgspec.json.decode(text)
    return RangeDone(str(part), int(completed), int(failed))


def _runs(lease: bytes | None, now_ms: int) -> bool:
    if lease is None:
        return False
    expires_ms, lease_ms = msgspec.json.decode(lease)
    return lease_runs(expires_ms, lease_ms, now_ms)
