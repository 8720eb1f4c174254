"""Which blocks an instance is believed to hold: LRU metadata within the instance's capacity.

A block is *reserved* once a request with it is held for the instance, and *resident* once such a request is dispatched
there. Reserved blocks attract others of their prefix to the instance; only resident ones are computed before the
request that is dispatched next.

A chain is stamped from its last block to its first, so a block is always younger than every longer prefix that contains
it: what is evicted first is a leaf, and what is listed is closed under prefixes, and so is what is resident. A hit can
therefore be found by binary search.

What the engine itself reported (``statestore.kv_events``) is *confirmed*: resident, and beyond capacity and LRU, until
the engine reports that it is gone. It is closed under prefixes by itself. Where the engine evicts the end of it, the
blocks that were booked behind that end stay, after a gap, and are no hits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from statestore.kv_events import BOOKING_MS, KvEventRecord, KvViewStatus


class KvMetadata:
    """The block hashes of one instance, least recently stamped first."""

    __slots__ = ("_booked", "_confirmed", "_term")

    def __init__(self) -> None:
        self._booked: OrderedDict[int, tuple[bool, int]] = OrderedDict()
        """By hash, whether it is resident, and the term in which it was stamped."""
        self._confirmed: set[int] = set()
        self._term = 0

    def __len__(self) -> int:
        return len(self._booked) + len(self._confirmed)

    def hit_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are listed, reserved or resident; O(log chain)."""
        booked, confirmed = self._booked, self._confirmed
        hit = bisect_left(hashes, True, key=lambda each: each not in booked and each not in confirmed)
        if hit > 1 and hashes[hit - 1] in booked:
            head = bisect_left(hashes, True, hi=hit, key=lambda each: each not in confirmed) if confirmed else 0
            if hashes[head] not in booked:
                return head
        return hit

    def resident_blocks(self, hashes: Sequence[int]) -> int:
        """Blocks at the head of the chain that are resident; O(log chain)."""
        booked, confirmed = self._booked, self._confirmed
        hit = self.hit_blocks(hashes)
        return bisect_left(
            hashes, True, hi=hit, key=lambda each: not booked.get(each, _NOT)[0] and each not in confirmed
        )

    def stamp(self, hashes: Sequence[int], resident_blocks: int, capacity_blocks: int) -> None:
        """Enter the chain as the youngest, its first blocks as resident, evicting the oldest beyond capacity. What is
        listed of it is left alone where the engine has confirmed the last of that."""
        booked, confirmed = self._booked, self._confirmed
        hit = self.hit_blocks(hashes) if confirmed else 0
        settled = hit if hit and hashes[hit - 1] in confirmed else 0
        for position in range(min(len(hashes), capacity_blocks) - 1, settled - 1, -1):
            block = hashes[position]
            if block not in confirmed:
                booked[block] = (position < resident_blocks, self._term)
                booked.move_to_end(block)
        for _ in range(len(booked) - capacity_blocks):
            booked.popitem(last=False)

    def confirm(self, hashes: Iterable[int]) -> int:
        """The engine holds these; returns how many were listed before."""
        listed = 0
        for each in hashes:
            listed += self._booked.pop(each, None) is not None or each in self._confirmed
            self._confirmed.add(each)
        return listed

    def remove(self, hashes: Iterable[int]) -> None:
        """The engine holds these no more."""
        for each in hashes:
            self._booked.pop(each, None)
            self._confirmed.discard(each)

    def end_term(self) -> None:
        """Take back what was booked before this term and never confirmed; the next term begins."""
        booked = self._booked
        while booked and next(iter(booked.values()))[1] < self._term:
            booked.popitem(last=False)
        self._term += 1

    def clear(self) -> None:
        self._booked.clear()
        self._confirmed.clear()

    def newest(self, limit: int) -> list[int]:
        """Listed hashes: those that are confirmed, then those stamped last, the newest first."""
        return [*islice(self._confirmed, limit), *islice(reversed(self._booked), max(0, limit - len(self._confirmed)))]

    def oldest_first(self) -> list[int]:
        """Every listed hash in the order of eviction, then those that are confirmed."""
        return [*self._booked, *sorted(self._confirmed)]


_NOT = (False, 0)


class KvEventsOf:
    """What is known of one instance's KV events: the record, the names, and the term of bookings."""

    def __init__(self, instance_id: str) -> None:
        self.record = KvEventRecord(instance_id)
        self.names: dict[bytes, bytes] = {}
        self._booked_since_ms: int | None = None

    def term_is_over(self, now_ms: int) -> bool:
        """Whether a term of bookings ended, or the first one begins; then the next one has begun."""
        if self._booked_since_ms is not None and now_ms - self._booked_since_ms < BOOKING_MS:
            return False
        self._booked_since_ms = now_ms
        return True

    def drop(self) -> None:
        """Forget how far events were read."""
        self.names.clear()
        self._booked_since_ms = None
        self.record = replace(self.record, sequence=None, published_s=0.0)

    def forget(self) -> None:
        """The same, for an instance whose cache is believed to be empty: the claim ends."""
        if self.record.fence == 0:
            return
        self.drop()
        status, reason = KvViewStatus.ESTIMATE, "the instance went down"
        self.record = replace(self.record, fence=self.record.fence + 1, status=status, reason=reason)
