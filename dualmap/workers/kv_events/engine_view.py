"""The content of one engine's caches by its events: the engine's names of blocks, and their hashes in the fleet.

Pure. Events are applied one after the other; ``take_change`` returns the resulting change for the store.

An engine may hold a block several times: two running requests compute the same prefix side by side, each copy is
reported as stored, and later each as removed. So copies are counted. ``tier_holdings`` has the blocks of tiers: these
are no hits on the device, and their removal removes nothing there. Tiers of a hybrid model are not followed.

The name of an adapter that is pointed at other weights leaves blocks in the cache that no request hits any more. They
have the fleet's hashes of the blocks that take their place, but other names: so a hash stands for the last name that
was stored for it, and a block of an adapter counts as long as its number is the highest that its adapter has had.

An engine with a speculative model may name a block by the tokens after it too (vLLM's ``lookahead_token_ids``). The
fleet's hash of such a block stands for several names, and is listed as long as one of them is held. The first prompt
that parts from a known text at the very end of a block is expected to find that block, though its name is another one.
With several cache groups a block with several names is no hit end: prompts part after it.

Of a hybrid model the view has the blocks of one group of full attention, the *main* one; ``group_holdings`` follows the
other groups. Blocks at which no hit may end are reported apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Final

import xxhash

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind
from dualmap.scheduling.prompts.engine_blocks import ROOT, TOKEN_BYTES, block_hash
from dualmap.statestore.kv_views import KvChange
from dualmap.workers.kv_events.decoding import Adapter, Batch, Cleared, Removed, Stored
from dualmap.workers.kv_events.engine_names import ROOT_HASHES
from dualmap.workers.kv_events.entries import KNOWN, NAME
from dualmap.workers.kv_events.group_holdings import AmbiguousEventsError, GroupHoldings, group_of
from dualmap.workers.kv_events.tier_holdings import TierHoldings

MAX_BLOCKS: Final = 1 << 20
"""Blocks of one device that are followed at most; 16 million tokens in blocks of 16."""

UNPLACED_BLOCKS: Final = 1024
"""Blocks of other groups without any of full attention that show that there is no such group."""

_DEVICE, _ADAPTER = b"d", b"a"
_NO_TIERS: Final[Mapping[Tier, int]] = {}


class EngineView:
    """Blocks of one engine. ``names`` as the store keeps them, from an earlier subscriber; ``sizes``, in tokens, of the
    tiers that it has; ``roots``, the engine's hashes that may be before a prompt's first block."""

    def __init__(
        self,
        names: Mapping[bytes, bytes] | None = None,
        sizes: Mapping[Tier, int] = _NO_TIERS,
        roots: Sequence[bytes] = ROOT_HASHES,
        former: EngineView | None = None,
    ) -> None:
        """``former`` is the view before events that were missed: names stand for the same blocks, whether these are
        still held or not."""
        self._roots = roots
        self._named_before = {} if former is None else former.named()
        """The fleet's hash of blocks that were known before, by the engine's name."""
        self._device: dict[int, tuple[int, int]] = {}
        """The fleet's hash and the number of copies of each block, by the engine's name."""
        self._tiers = TierHoldings(sizes)
        self._adapters: dict[int, tuple[int, int]] = {}
        """The hash of its adapter's name, and the adapter's number, of each device block that has one."""
        self._numbers: dict[int, int] = {}
        """The highest number of each adapter."""
        self._last: dict[int, int] = {}
        """The engine's name that was stored last for the fleet's hash of a block with an adapter."""
        self._same: defaultdict[int, set[int]] | None = None
        """The engine's names for each hash of a block without an adapter, where it has several; None: one each."""
        self._listed_before: dict[int, bool] = {}
        """Whether each of these hashes was listed when it was first touched since the last change was taken."""
        self._adapters_touched: set[int] = set()
        self._block_tokens = 0
        self._group: int | None = None
        """The group whose blocks are followed here, the main one."""
        self._holdings: GroupHoldings | None = None
        """The other groups; None with one group."""
        self._seen: dict[int | None, Stored] = {}
        """An event of each group in the batch with the main group's first block."""
        self._unplaced: list[Stored | Removed] = []
        """Events of other groups that came before any of the main one."""
        self._unplaced_blocks = 0
        """Their blocks."""
        self._reported: dict[int, bool] = {}
        """With other groups, all hashes that the store lists, and whether a hit may end there."""
        self._before: dict[int, int | None] = {}
        """The fleet's hash of each device block that was touched since the last change was taken; None: not held."""
        self._removed: dict[int, int] = {}
        """The fleet's hash of each device block that was removed since; some of them were stored again."""
        self._cleared = False
        self.orphans = 0
        """Stored blocks whose parent or adapter is unknown: they are not listed."""
        for name, known in (names or {}).items():
            tier, engine_name = NAME.unpack(name)
            if tier == _DEVICE:
                self._device[engine_name] = KNOWN.unpack(known)
            elif tier == _ADAPTER:
                self._adapters[engine_name] = KNOWN.unpack(known)
        self._tiers.restore(names or {})
        self._restore_adapters()
        if len({block for block, _ in self._device.values()}) < len(self._device):
            self._same = self._names_by_hash()
        self._holdings = GroupHoldings.restored(names or {}, roots)
        if self._holdings is not None:
            self._group, self._block_tokens = self._holdings.main, self._holdings.block_tokens
            self._holdings.turned()
            self._reported = {block: end for block, end in self._states(self._device).items() if end is not None}

    def __len__(self) -> int:
        """Blocks that the device holds."""
        return len(self._device)

    @property
    def tier_blocks(self) -> int:
        """Blocks that the tiers hold."""
        return len(self._tiers)

    @property
    def changed_blocks(self) -> int:
        """The number of blocks that changed since the last change was taken."""
        others = 0 if self._holdings is None else self._holdings.changed
        return len(self._before) + self._tiers.changed + others

    @property
    def named_blocks(self) -> int:
        """Names that the store has to keep."""
        others = 0 if self._holdings is None else len(self._holdings)
        return len(self._device) + len(self._tiers) + len(self._adapters) + others

    @property
    def groups(self) -> str:
        """The cache groups of a hybrid model, for people; empty with one group."""
        return "" if self._holdings is None else self._holdings.described

    def apply(self, batch: Batch) -> None:
        """Raises AmbiguousEventsError."""
        if not self._block_tokens:
            self._seen = {each.group: each for each in batch.events if isinstance(each, Stored) and each.tier is None}
        for event in batch.events:
            if isinstance(event, Stored):
                if event.tier is None:
                    self._store(event)
                elif self._holdings is None:
                    self._tiers.store(event.tier, event.names, self._block_of, self._block_tokens)
            elif isinstance(event, Removed):
                if event.tier is not None:
                    self._tiers.remove(event.tier, event.names)
                elif self._unplaced:
                    self._hold_back(event)
                elif self._holdings is None or event.group in (None, self._group):
                    self._remove(event)
                else:
                    self._holdings.remove(event.group, event.names)
            elif isinstance(event, Cleared):
                self._clear()
        if len(self._device) + (0 if self._holdings is None else self._holdings.blocks) > MAX_BLOCKS:
            raise AmbiguousEventsError(f"the engine reports over {MAX_BLOCKS} blocks")

    def take_change(self, sequence: int, published_s: float, *, all_names: bool = False) -> tuple[KvChange, bool]:
        """Return the change since the last call, and whether all that the store listed before has to be dropped first.
        With ``all_names`` the change has all names, not the changed ones alone.

        A block that was stored and removed since is reported as removed: the store may list it, since a placement
        booked it. A block that was stored again, under whichever name, is not.
        """
        device, stored = self._device, []
        names: dict[bytes, bytes] = {}
        for name, before in self._before.items():
            now = device.get(name)
            if not all_names:
                names[NAME.pack(_DEVICE, name)] = b"" if now is None else KNOWN.pack(*now)
            if now is not None and before is None and now[0] not in self._listed_before:
                stored.append(now[0])
        held = {*stored, *self._listed_before}
        removed = [block for name, block in self._removed.items() if name not in device and block not in held]
        for block, was_listed in self._listed_before.items():
            if not self._is_listed(block):
                removed.append(block)
            elif not was_listed:
                stored.append(block)
        if all_names:
            names = self._all_names()
        else:
            names |= self._tiers.take_entries()
            for name in self._adapters_touched:
                adapter = self._adapters.get(name)
                names[NAME.pack(_ADAPTER, name)] = b"" if adapter is None else KNOWN.pack(*adapter)
        inner: list[int] = []
        turned = step_tokens = 0
        if self._holdings is not None:
            names |= self._holdings.take_entries(every=all_names)
            step_tokens = self._holdings.step_tokens
            stored, inner, removed, turned = self._take_states()
        cleared, self._cleared = self._cleared, False
        self._before.clear()
        self._removed.clear()
        self._listed_before.clear()
        self._adapters_touched.clear()
        change = KvChange(
            sequence,
            published_s,
            stored,
            removed,
            names,
            all_names,
            inner,
            turned=turned,
            hit_step_tokens=step_tokens,
            tiers=self._tiers.take_change(self._block_tokens),
        )
        return change, cleared

    def _block_of(self, name: int) -> int | None:
        """The fleet's hash of a block that the device holds, or held before events were missed."""
        known = self._device.get(name)
        return self._named_before.get(name) if known is None else known[0]

    def named(self) -> dict[int, int]:
        """The fleet's hash of each block that is known, by the engine's name. Without those of adapters: a name of
        theirs stands for other weights, once these are loaded in place."""
        held = ((name, block) for name, (block, _) in self._device.items() if name not in self._adapters)
        return dict(islice(chain(held, self._named_before.items()), MAX_BLOCKS))

    # cache groups ----------------------------------------------------------------------------------------------------
    def _states(self, names: Iterable[int]) -> dict[int, bool | None]:
        """Whether a hit may end at each of these blocks, by their hashes; None where a block is not listed."""
        assert self._holdings is not None
        states: dict[int, bool | None] = {}
        for name in names:
            block = self._device[name][0]
            last = self._last.get(block)  # of a block with an adapter
            if self._holdings.holds(name) and (last is None or (last == name and self._is_listed(block))):
                is_named_once = self._same is None or len(self._same.get(block, ())) < 2
                states[block] = states.get(block) or (is_named_once and self._holdings.is_end(name))
            else:
                states.setdefault(block, None)
        return states

    def _take_states(self) -> tuple[list[int], list[int], list[int], int]:
        """The blocks that came or changed: hit ends, inner ones, those that are not listed any more, and how many of
        the first two were listed before."""
        assert self._holdings is not None
        device = self._device
        last = (self._last.get(block) for block in self._listed_before)
        names = {*self._before, *self._holdings.turned(), *(name for name in last if name is not None)}
        if self._same is not None:
            touched = {*self._listed_before, *(device[name][0] for name in names if name in device)}
            names |= {name for block in touched for name in self._same.get(block, ())}
        states: dict[int, bool | None] = dict.fromkeys([*self._removed.values(), *self._listed_before])
        states |= self._states(name for name in names if name in device)
        kept = {block: end for block, end in states.items() if end is not None}
        changed = [block for block, end in kept.items() if self._reported.get(block) is not end]
        ends, inner = ([block for block in changed if kept[block] is wanted] for wanted in (True, False))
        removed = [block for block, end in states.items() if end is None]
        turned = sum(block in self._reported for block in changed)
        for block in removed:
            self._reported.pop(block, None)
        self._reported.update(kept)
        return ends, inner, removed, turned

    def _place(self, event: Stored) -> bool:
        """Whether a stored block is of the main group. What another one stored is entered."""
        group, holdings = event.group, self._holdings
        if not self._block_tokens:
            if not event.kind or _group_of(event).kind is GroupKind.FULL:
                return True
            self._hold_back(event)
            return False
        if group == self._group:
            return True
        if group is None:
            raise AmbiguousEventsError("blocks of a hybrid model are stored without the number of their group")
        if holdings is None:
            if self._group is None:
                raise AmbiguousEventsError("blocks of a hybrid model are stored without the number of their group")
            holdings = self._holdings = GroupHoldings(self._group, self._block_tokens, self._roots)
            for name, (block, _) in self._device.items():
                if self._before.setdefault(name, block) is not None:
                    self._reported[block] = True
        holdings.store(group, _group_of(event), event.names)
        return False

    def _hold_back(self, event: Stored | Removed) -> None:
        """Keep an event of another group until the main one is known; one without blocks shows its group
        alone, once."""
        if not event.names and any(each.group == event.group for each in self._unplaced):
            return
        self._unplaced.append(event)
        self._unplaced_blocks += len(event.names)
        if self._unplaced_blocks > UNPLACED_BLOCKS:
            raise AmbiguousEventsError("the engine has no cache group of full attention")

    def _all_names(self) -> dict[bytes, bytes]:
        names = {NAME.pack(_DEVICE, name): KNOWN.pack(*known) for name, known in self._device.items()}
        adapters = {NAME.pack(_ADAPTER, name): KNOWN.pack(*each) for name, each in self._adapters.items()}
        return names | self._tiers.take_entries(every=True) | adapters

    def _store(self, event: Stored) -> None:
        if not self._place(event) or self._is_part(event):
            return
        self._check(event)
        parent = ROOT if event.parent is None else self._block_of(event.parent)
        if parent is None or not event.translatable:
            self.orphans += len(event.names)
            return
        device, before, extras, data = self._device, self._before, event.extras, event.token_bytes
        adapter = None if event.adapter is None else self._known_adapter(event.adapter)
        size, holdings, name_before = event.block_tokens * TOKEN_BYTES, self._holdings, event.parent
        if event.looks_ahead and self._same is None:
            self._same = self._names_by_hash()
        for place, name in enumerate(event.names):
            block_data, extra = data[place * size : (place + 1) * size], extras[place] if extras else b""
            parent = block_hash(parent, block_data, extra)
            held = device.get(name)
            if name not in before:
                before[name] = None if held is None else held[0]
            device[name] = (parent, 1 if held is None else held[1] + 1)
            self._tiers.learn(name, parent)
            if adapter is not None:
                self._store_of_adapter(name, parent, adapter)
            elif self._same is not None:
                self._touch(parent)
                self._same[parent].add(name)
            if holdings is not None:
                holdings.link(name, name_before, block_data, extra)
                name_before = name

    def _check(self, event: Stored) -> None:
        if len(event.token_bytes) != len(event.names) * event.block_tokens * TOKEN_BYTES:
            raise AmbiguousEventsError("token ids of a stored block do not fill it")
        if event.extras and len(event.extras) != len(event.names):
            raise AmbiguousEventsError("there are not as many extra keys as stored blocks")
        if not self._block_tokens:
            self._block_tokens, self._group = event.block_tokens, event.group
            self._place_others(event.group)
        elif event.block_tokens != self._block_tokens:
            raise AmbiguousEventsError("hits end inside of blocks (--prefix-match-unit), whose places are not known")

    def _is_part(self, event: Stored) -> bool:
        """Whether it is a part of a block of the main group that no hit ends at. If only such parts came before the
        first whole block, they are dropped."""
        holdings = self._holdings
        if holdings is None or event.block_tokens == self._block_tokens:
            return False
        if event.block_tokens < self._block_tokens:
            return holdings.is_part(event.block_tokens)
        longer = holdings.with_blocks_of(event.block_tokens)
        if longer.is_part(self._block_tokens):
            self._remove(Removed([name for name, (_, copies) in self._device.items() for _ in range(copies)], None))
            self._holdings, self._block_tokens = longer, event.block_tokens
        return False

    def _place_others(self, group: int | None) -> None:
        """The main group is known now. A group with a higher number than 0 is not alone."""
        if group is not None and (group > 0 or len(self._seen) > 1):
            self._holdings = GroupHoldings(group, self._block_tokens, self._roots)
            for number, event in self._seen.items():
                if number is not None and number != group:
                    self._holdings.store(number, _group_of(event), ())
        unplaced, self._unplaced, self._unplaced_blocks = self._unplaced, [], 0
        for each in unplaced:
            if isinstance(each, Stored):
                self._place(each)
            elif self._holdings is not None and each.group is not None:
                self._holdings.remove(each.group, each.names)

    def _remove(self, event: Removed) -> None:
        device, before = self._device, self._before
        for name in event.names:
            held = device.get(name)
            if held is None:
                continue
            if name not in before:
                before[name] = held[0]
            if held[1] > 1:
                device[name] = (held[0], held[1] - 1)
            else:
                del device[name]
                self._removed[name] = held[0]
                if self._holdings is not None:
                    self._holdings.unlink(name)
                if name in self._adapters:
                    self._remove_of_adapter(name, held[0])
                elif self._same is not None:
                    self._remove_of_several(name, held[0])

    def _clear(self) -> None:
        """Drop the view. The store drops the names of tiers too; they are sent again."""
        self._device.clear()
        self._before.clear()
        self._removed.clear()
        self._tiers.send_again()
        self._adapters.clear()
        self._last.clear()
        self._same = None
        self._listed_before.clear()
        self._adapters_touched.clear()
        self._reported.clear()
        self._unplaced.clear()
        self._unplaced_blocks = 0
        if self._holdings is not None:
            self._holdings.clear()
        self._cleared = True

    # blocks with several names ------------------------------------------------------------------------------------
    def _names_by_hash(self) -> defaultdict[int, set[int]]:
        found: defaultdict[int, set[int]] = defaultdict(set)
        for name, (block, _) in self._device.items():
            if name not in self._adapters:
                found[block].add(name)
        return found

    def _remove_of_several(self, name: int, block: int) -> None:
        assert self._same is not None
        self._touch(block)
        self._same[block].discard(name)
        if not self._same[block]:
            del self._same[block]

    # blocks of adapters --------------------------------------------------------------------------------------------
    def _restore_adapters(self) -> None:
        """Find the last name for each hash, and the highest numbers, of what an earlier subscriber knew."""
        for name, (adapter, number) in sorted(self._adapters.items(), key=lambda each: each[1][1]):
            self._numbers[adapter] = number
            if name in self._device:
                self._last[self._device[name][0]] = name

    def _known_adapter(self, adapter: Adapter) -> tuple[int, int]:
        """The hash of the adapter's name, and its number. Where the number is a new one the blocks of all before it
        count no more."""
        key = xxhash.xxh3_64_intdigest(adapter.name.encode("utf-8", "surrogatepass"))
        number = adapter.number & 0xFFFFFFFF
        if number > self._numbers.get(key, 0):
            older = [name for name, known in self._adapters.items() if known[0] == key]
            for name in older:
                self._touch(self._device[name][0])
            self._numbers[key] = number
        return key, number

    def _store_of_adapter(self, name: int, block: int, adapter: tuple[int, int]) -> None:
        self._touch(block)
        self._adapters[name] = adapter
        self._adapters_touched.add(name)
        last = self._last.get(block)
        if last is None or self._adapters[last][1] <= adapter[1]:
            self._last[block] = name

    def _remove_of_adapter(self, name: int, block: int) -> None:
        self._touch(block)
        del self._adapters[name]
        self._adapters_touched.add(name)
        if self._last.get(block) == name:
            del self._last[block]

    def _touch(self, block: int) -> None:
        if block not in self._listed_before:
            self._listed_before[block] = self._is_listed(block)

    def _is_listed(self, block: int) -> bool:
        """Whether a request, with the adapter's present weights if it has one, would hit the block with this hash."""
        name = self._last.get(block)
        if name is None:
            return self._same is not None and block in self._same
        adapter, number = self._adapters[name]
        return number >= self._numbers.get(adapter, 0)


def _group_of(event: Stored) -> CacheGroup:
    """The cache group of a stored block. Raises AmbiguousEventsError."""
    return group_of(event.kind, event.block_tokens, event.window_tokens)
