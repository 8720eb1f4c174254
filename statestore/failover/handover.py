"""Between the shared store and a local ledger: how one starts from what is known, and how the other gets it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from scheduling.instance import InstanceLoad
from scheduling.prefill_rate import PrefillRate
from scheduling.settings import SchedulingSettings
from statestore.base import Membership, PoolStore, RequestRecord, RequestState
from statestore.batches import batches, for_each
from statestore.ledger import PoolLedger, upkeep
from statestore.reaping import latest_first


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
    """Whether the store forgot members: their epoch only ever grows, and does whenever one of them leaves."""
    if found.epoch == known.epoch:
        return not known.instances.keys() <= found.instances.keys()
    return found.epoch < known.epoch


async def hand_back(
    ledger: PoolLedger,
    replica_ids: Set[str],
    primary: PoolStore,
    found: Membership,
    known: Membership,
    now_ms: Callable[[], int],
) -> None:
    """Make the shared store say what this replica's ledger says of its own requests, those of ``replica_ids``.

    The replica holds the clients' connections, so of its own requests it knows best: those that the store has and the
    ledger has not are over, whether they ended meanwhile or the store came back from an older snapshot; they are
    finished. Those that the store lost, or has in another state or place, are entered as they are. Another replica's
    live request of the same id stays in their place. Members are restored where the store lost them; what was removed
    there on purpose stays removed.
    """
    if lost_members(found, known):
        missing = [account.spec for name, account in ledger.accounts.items() if name not in found.instances]
        await for_each(missing, primary.put_instance)
    asked_ms = now_ms()
    stored = await primary.snapshot()
    over = [
        record
        for record in stored.requests
        if record.replica_id in replica_ids and record.request_id not in ledger.requests
    ]
    await for_each(latest_first(over), lambda record: _finish(primary, record))
    there = {record.request_id: record for record in stored.requests}
    mine = [request.record() for request in ledger.requests.values()]
    differing = [record for record in mine if not _same(record, there.get(record.request_id))]
    await for_each(
        (record for record in differing if record.request_id in there), lambda record: _finish(primary, record)
    )
    ahead_ms = stored.now_ms - asked_ms
    entering = (_as_stored(record, there.get(record.request_id), ahead_ms) for record in differing)
    for batch in batches(entering):
        await primary.adopt(batch)


async def _finish(primary: PoolStore, record: RequestRecord) -> None:
    await primary.finish(record.request_id, replica_id=record.replica_id)


def _as_stored(record: RequestRecord, former: RequestRecord | None, ahead_ms: int) -> RequestRecord:
    """The record with its times shifted by ``ahead_ms`` onto the store's clock. What the store knew of it as ``former``
    keeps its place in the order of arrival."""
    shifted = replace(
        record,
        enqueued_ms=record.enqueued_ms + ahead_ms,
        dispatched_ms=record.dispatched_ms and record.dispatched_ms + ahead_ms,
        prefilled_ms=record.prefilled_ms and record.prefilled_ms + ahead_ms,
    )
    if former is None or former.replica_id != record.replica_id:
        return shifted
    return replace(shifted, enqueued_ms=former.enqueued_ms, sequence=former.sequence)


def _same(mine: RequestRecord, there: RequestRecord | None) -> bool:
    return there is not None and _standing(mine) == _standing(there)


def _standing(record: RequestRecord) -> tuple[str, RequestState, str, int]:
    return record.replica_id, record.state, record.instance_id, record.attempt
