"""Recovery: what the store lost is entered again, and what it still has but is over here is finished.

One path for a replica that starts under its old id, one whose lease expired, a store that came back empty or from an
older snapshot, and a replica that decided alone for a while. It is built from the live requests, and from the ends that
the store did not take, or may have lost (``UnsettledEnds``): a request that has ended gives back what it did not use,
once, and is not taken for one whose replica died.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from dualmap.scheduling.request.metering import KEPT, used_by_lost
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.statestore.call_values import Membership
from dualmap.statestore.port import ReplicaPool, RequestPort

MOST_ENDS: Final = 4096
"""Ends of requests that the store never knew, which are kept for it at most: they are entered at the hand-over, for
which all calls wait."""
DOUBTED_S: Final = 5.0
"""A store that crashes, or is replaced by its copy, may have lost the ends of so long before."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result of a recovery."""

    released: int
    """Requests that the store had although they are over here."""
    adopted: int


@dataclass(frozen=True, slots=True)
class End:
    """The end of a request, which the store is to be told."""

    release: Release
    record: StoredRequest | None
    """The request as it was then. None: its release may have taken effect in the store, so it is not entered again."""


@dataclass(slots=True)
class UnsettledEnds:
    """The ends of a replica's requests that draw from budgets, or are metered, as far as the store may not have them:
    those that a local state took, and those that the store took last, which it may lose."""

    now_s: Callable[[], float]
    dropped: int = 0
    """Ends that were not kept, as there were too many."""
    _taken: deque[tuple[float, Sequence[Release]]] = field(default_factory=deque)
    _kept: dict[str, End] = field(default_factory=dict)
    _entered: int = 0
    """The kept requests that the store never knew."""

    def taken(self, releases: Sequence[Release]) -> None:
        """The store took these."""
        now_s, taken = self.now_s(), self._taken
        taken.append((now_s, releases))
        while taken[0][0] < now_s - DOUBTED_S:
            taken.popleft()

    def keep(self, releases: Iterable[Release], records: Mapping[str, StoredRequest], known: Container[str]) -> None:
        """A local state takes these, in which the requests have these records; ``known`` are the ids of those that the
        store may know."""
        for release in releases:
            if not _is_end(release):
                continue
            record = records.get(release.request_id)
            if record is not None and release.request_id not in known:
                if self._entered >= MOST_ENDS:
                    self.dropped += 1
                    continue
                self._entered += 1
            self._kept[release.request_id] = End(release, record)

    def all(self) -> dict[str, End]:
        """All that may be missing in the store, by id: the last end of each."""
        now_s, found = self.now_s(), dict[str, End]()
        for at_s, releases in self._taken:
            if at_s >= now_s - DOUBTED_S:
                found |= {each.request_id: End(each, None) for each in releases if _is_end(each)}
        return found | self._kept

    def settled(self) -> None:
        """The store has them all."""
        self._kept.clear()
        self._taken.clear()
        self._entered = self.dropped = 0


def _is_end(release: Release) -> bool:
    """Whether a release ends a request for good that was counted for a tenant. The end of a try is none."""
    return not release.instance_id and release.used != KEPT and (release.returned is not None or bool(release.used))


_NO_ENDS: Final[Mapping[str, End]] = {}


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
        await pool.adapters.restore(former.adapters)
        await pool.revisions.restore(former.revisions, former.rollout)
        await pool.settings.restore(former.overrides)
    return len(missing)


async def recover_requests(
    pool: RequestPort,
    stored: Sequence[StoredRequest],
    live: Sequence[StoredRequest],
    ends: Mapping[str, End] = _NO_ENDS,
) -> Recovered:
    """Make the store agree with a replica about the replica's own requests.

    ``stored`` is what the store had of them, read before ``live`` was: what was placed in between stays. The replica
    holds the clients' connections: it knows which requests are live, and where the dispatched ones are. A held request
    stays as the store has it, as it may have been moved or granted since. What is entered again keeps its place in the
    order of arrival. Another replica's live request of the same id is left alone.

    ``ends`` are of requests that are over here, by id. They are entered as if they were live, where the store does not
    have them so, and end then: what the store had of them is given back and metered by how they ended.
    """
    former, here = {request.request_id: request for request in stored}, {request.request_id for request in live}
    ended = {name: end for name, end in ends.items() if name not in here and (end.record or name in former)}
    wrong = [request for request in live if not _stands(request, former.get(request.request_id))]
    wrong += [end.record for name, end in ended.items() if end.record and not _may_end(end.record, former.get(name))]
    over = [request for request in stored if request.request_id not in here and request.request_id not in ended]
    moved = [
        Release(request.request_id, "", known.replica_id, known.attempt, used="" if request.instance_id else KEPT)
        for request in wrong
        if (known := former.get(request.request_id)) is not None
    ]
    # Releases come first: ``adopt`` leaves known requests alone, so a wrong record must be gone before it.
    await pool.release([*left_over(over), *moved])
    entered = [_as_stored(each, former.get(each.request_id)) for each in wrong]
    adopted = await pool.adopt(entered) if entered else 0
    if ended:
        await pool.release([end.release for end in ended.values()])
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
    if stored is None or stored.attempt != mine.attempt or not stored.instance_id:
        return False
    return mine.state is RequestState.HELD or (mine.state, mine.instance_id) == (stored.state, stored.instance_id)


def _may_end(mine: StoredRequest, stored: StoredRequest | None) -> bool:
    """Whether a request that is over may end by the record that the store has of it: what it drew is that of its last
    try. Where it was then does not matter any more."""
    return stored is not None and stored.attempt == mine.attempt and bool(stored.instance_id) == bool(mine.instance_id)


def _as_stored(request: StoredRequest, former: StoredRequest | None) -> StoredRequest:
    return request if former is None else replace(request, enqueued_ms=former.enqueued_ms)
