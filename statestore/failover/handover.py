"""Between the shared store and a local ledger: how one starts from what is known, and how the other gets it back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from scheduling.instance import InstanceLoad
from scheduling.prefill_rate import PrefillRate
from scheduling.settings import SchedulingSettings
from statestore.base import Membership, PoolStore, RequestRecord
from statestore.ledger import PoolLedger, upkeep

_BATCH = 256
"""Calls in flight at once, so that a big hand-over does not starve everything else."""

T = TypeVar("T")


def local_ledger(
    scheduling: SchedulingSettings,
    known: Membership,
    loads: Mapping[str, InstanceLoad],
    own: Sequence[RequestRecord],
    now_ms: int,
    last_sequence: int,
) -> PoolLedger:
    """A ledger of this replica alone: last known members and rates, its own live requests, nobody else's."""
    ledger = PoolLedger(scheduling)
    for spec in known.instances.values():
        ledger.put_instance(spec, now_ms)
        if spec.instance_id in loads:
            rate = loads[spec.instance_id].prefill_tokens_per_s
            ledger.accounts[spec.instance_id].rate = PrefillRate.prior(rate)
    # Versions as the replica knows them, so that it keeps its view instead of asking for a newer one.
    ledger.epoch, ledger.tree_version, ledger.tree = known.epoch, known.tree_version, known.tree
    ledger.text_ratio.bytes_per_token = known.bytes_per_token
    ledger.last_request_sequence = last_sequence
    upkeep.adopt(ledger, own, now_ms)
    return ledger


def lost_members(found: Membership, known: Membership) -> bool:
    """Whether the store forgot members: their epoch only ever grows."""
    return found.epoch < known.epoch


async def hand_back(
    ledger: PoolLedger, ended: Collection[str], primary: PoolStore, found: Membership, known: Membership
) -> None:
    """Make the shared store say what this replica's ledger says of its own requests.

    The replica holds the clients' connections, so of its own requests it knows best: those that ended are
    finished; those that the store lost, or has in another state or place, are entered as they are. Members are
    restored where the store lost them; what was removed there on purpose stays removed.
    """
    if lost_members(found, known):
        missing = [account.spec for name, account in ledger.accounts.items() if name not in found.instances]
        await _each(missing, primary.put_instance)
    await _each(ended, primary.finish)
    records = [request.record() for request in ledger.requests.values()]
    for batch in _batches(records):
        there = await primary.held_states([record.request_id for record in batch])
        differing = [record.request_id for record in batch if not _same(record, there.get(record.request_id))]
        await _each([request_id for request_id in differing if request_id in there], primary.finish)
        await primary.adopt([record for record in batch if record.request_id in differing])


def _same(mine: RequestRecord, there: RequestRecord | None) -> bool:
    return there is not None and (mine.state, mine.instance_id, mine.attempt) == (
        there.state,
        there.instance_id,
        there.attempt,
    )


async def _each(items: Iterable[T], call: Callable[[T], Awaitable[object]]) -> None:
    """One call per item, a bounded number at once."""
    for batch in _batches(items):
        await asyncio.gather(*(call(item) for item in batch))


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, _BATCH)):
        yield batch
