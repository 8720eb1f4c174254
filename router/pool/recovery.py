"""Recovery: what the store lost is entered again, and what it still has but is over here is finished.

One path for a replica that starts under its old id, one whose lease expired, a store that came back empty or from an
older snapshot, and a replica that decided alone for a while. It is built from the live requests; nothing else
remembers them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dualmap.scheduling.request.metering import KEPT, used_by_lost
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.answers import Membership
from dualmap.statestore.port import ReplicaPool


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    released: int
    """Requests that the store had although they are over here."""
    adopted: int


async def restore_members(pool: ReplicaPool, members: Iterable[InstanceSpec], former: Membership | None = None) -> int:
    """Enter members that the store does not know, and what else was given to the running fleet by a ``former``
    membership; what is known stays as it is. Returns how many members.

    Raises:
        StoreSchemaError: another version uses the pool, beside which this one must not run.
    """
    await pool.schema.enter()
    known = (await pool.membership()).instances
    missing = [spec for spec in members if spec.instance_id not in known]
    await asyncio.gather(*map(pool.members.put_instance, missing))
    if former is not None:
        await pool.members.restore_names(former.names)
        await pool.settings.restore(former.overrides)
    return len(missing)


async def recover_requests(
    pool: ReplicaPool, stored: Sequence[StoredRequest], live: Sequence[StoredRequest]
) -> Recovered:
    """Make the store agree with a replica about the replica's own requests.

    ``stored`` is what the store had of them, read before ``live`` was: what was placed in between stays. The replica
    holds the clients' connections: it knows which requests are live, and where the dispatched ones are. A held request
    stays as the store has it, as it may have been moved or granted since. What is entered again keeps its place in the
    order of arrival. Another replica's live request of the same id is left alone.
    """
    former, here = {request.request_id: request for request in stored}, {request.request_id for request in live}
    wrong = [request for request in live if not _stands(request, former.get(request.request_id))]
    over = [request for request in stored if request.request_id not in here]
    moved = [
        Release(request.request_id, "", known.replica_id, known.attempt, used="" if request.instance_id else KEPT)
        for request in wrong
        if (known := former.get(request.request_id)) is not None
    ]
    # Releases come first: ``adopt`` leaves known requests alone, so a wrong record must be gone before it.
    await pool.release([*left_over(over), *moved])
    entered = [_as_stored(each, former.get(each.request_id)) for each in wrong]
    adopted = await pool.adopt(entered) if entered else 0
    return Recovered(len(over), adopted)


def left_over(requests: Sequence[StoredRequest]) -> list[Release]:
    """The releases of requests that are over here, and stand in the store."""
    known = {request.request_id for request in requests}
    return [
        Release(each.request_id, "", each.replica_id, each.attempt, used=used_by_lost(each, known)) for each in requests
    ]


def lost_members(found: Membership, known: Membership) -> bool:
    """Whether the store forgot members: their epoch only ever grows, and does whenever one of them leaves."""
    if found.epoch == known.epoch:
        return not known.instances.keys() <= found.instances.keys()
    return found.epoch < known.epoch


def _stands(mine: StoredRequest, stored: StoredRequest | None) -> bool:
    """Whether the store may keep what it has of a live request. One that no instance has stands on none, or where the
    try is that is being made or released."""
    if stored is not None and not mine.instance_id:
        return not stored.instance_id or stored.attempt == mine.attempt
    if stored is None or stored.attempt != mine.attempt:
        return False
    return mine.state is RequestState.HELD or (mine.state, mine.instance_id) == (stored.state, stored.instance_id)


def _as_stored(request: StoredRequest, former: StoredRequest | None) -> StoredRequest:
    return request if former is None else replace(request, enqueued_ms=former.enqueued_ms)
