"""Publications for replicas, and the logs that they are made from."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.estimates.learning import Sample
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.hotness import Arrival, HotnessTree
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.pool import codec
from dualmap.statestore.pool.calls import Command
from dualmap.statestore.pool.changes import Change, Changes
from dualmap.statestore.pool.codec import pairs_from
from dualmap.statestore.pool.logs import last_logged, logged
from dualmap.statestore.pool.readable import UNREADABLE, checks_replies, count_from
from dualmap.statestore.records import HASH_BYTES, unpack_chain

SCALING_LOG = 1000
"""Lines of the log of scaling that are kept."""
_WORDS = 1000
"""Words of one command: a script hands over no more than some thousands."""


class Publications(Changes):
    """The hotness tree, what was learned, and scaling decisions; with the arrival log and the sample log."""

    @checks_replies
    async def arrivals(self, after: str, limit: int) -> Sequence[Arrival]:
        """The arrival log after entry ``after`` ('0' = from its start), oldest first."""
        arrivals = []
        for entry_id, flat in await self._entries(self._keys.arrivals, after, limit):
            with contextlib.suppress(*UNREADABLE):  # no entry of this fleet: it leaves the log by itself
                values = pairs_from(flat)
                arrivals.append(Arrival(entry_id.decode(), count_from(values[b"at"]), unpack_chain(values[b"head"])))
        return arrivals

    @checks_replies
    async def samples(self, after: str, limit: int) -> Sequence[Sample]:
        """Samples of first tokens and prompt lengths, after entry ``after`` ('0' = from the start of the log)."""
        samples = []
        for entry in await self._entries(self._keys.samples, after, limit):
            with contextlib.suppress(*UNREADABLE):
                samples.append(codec.sample_from(*entry))
        return samples

    async def _entries(self, log: bytes, after: str, limit: int) -> Any:
        return await self._calls.command("XRANGE", log, f"({after}", "+", "COUNT", limit)

    @checks_replies
    async def publish_tree(self, tree: HotnessTree, counts: Mapping[int, int], *, fence: int) -> int:
        """Replace the hotness tree (with its counters, for people); returns the tree version, which grows when the
        set of hot prefixes changes."""
        keys = self._keys
        known = codec.tree_from(pairs_from(await self._calls.command("HGETALL", keys.hotness_tree)))
        grows: Command = ("HINCRBY", keys.meta, "tree_version", int(known.hot != tree.hot))
        await self._publish(keys.hotness_tree, codec.tree_fields(tree, counts), grows, fence=fence)
        return int(await self._calls.command("HGET", keys.meta, "tree_version"))

    @checks_replies
    async def publish_learned(self, learned: Learned, tokens_per_s: Mapping[str, float], *, fence: int) -> None:
        """Publish what was learned: of the pool, and the prefill rates of instances."""
        rates = {instance_id: {"tokens_per_s": rate} for instance_id, rate in tokens_per_s.items()}
        await self._publish(self._keys.learned, codec.fields_of(learned), fence=fence, instances=rates)

    async def _publish(self, key: bytes, fields: Mapping[str, str], *more: Command, **about: Any) -> None:
        """Replace the fields of a key."""
        words = [word for pair in fields.items() for word in pair]
        commands: list[Command] = [("DEL", key)]
        commands += [("HSET", key, *words[first : first + _WORDS]) for first in range(0, len(words), _WORDS)]
        await self._make(Change([*commands, *more], **about))

    @checks_replies
    async def scaling(self, role: str = "") -> ScaleRecord:
        """The last scaling decision and what came of it, on the instances of role ``decode`` or, by "", on all others.
        That of a pool that never scaled has number 0."""
        pairs = pairs_from(await self._calls.command("HGETALL", self._scaling_key(role)))
        return codec.record_from(ScaleRecord(role=role), pairs)

    @checks_replies
    async def record_scaling(self, record: ScaleRecord, entry: ScaleEntry, *, fence: int) -> None:
        """Replace the record, and add a line to the log, which keeps the last ones."""
        line = logged(self._keys.scaling_log, entry, SCALING_LOG)
        await self._publish(self._scaling_key(record.role), codec.fields_of(record), *line, fence=fence)

    def _scaling_key(self, role: str) -> bytes:
        return self._keys.scaling_decode if role else self._keys.scaling

    @checks_replies
    async def scaling_log(self, limit: int) -> Sequence[ScaleEntry]:
        """The last lines of the log, the latest first."""
        return await last_logged(self._calls, self._keys.scaling_log, ScaleEntry, limit)

    @checks_replies
    async def discovery(self) -> DiscoveryStatus:
        """How discovery goes, as its leader last said; a pool without discovery has one of time 0."""
        return codec.record_from(
            DiscoveryStatus(), pairs_from(await self._calls.command("HGETALL", self._keys.discovery))
        )

    @checks_replies
    async def record_discovery(self, status: DiscoveryStatus, *, fence: int) -> None:
        """Replace the status."""
        await self._publish(self._keys.discovery, codec.fields_of(status), fence=fence)

    @checks_replies
    async def recent_blocks(self, instance_ids: Sequence[str], limit: int) -> Mapping[str, Sequence[int]]:
        """The hashes that each instance was last given, at most ``limit`` of each; empty for an unknown one."""
        blocks: dict[str, Sequence[int]] = {}
        for name in instance_ids:  # one by one: the store serves requests in between
            newest = await self._calls.command("ZREVRANGE", self._keys.kv(name), 0, limit - 1)
            blocks[name] = unpack_chain(b"".join(block for block in newest if len(block) == HASH_BYTES))
        return blocks
