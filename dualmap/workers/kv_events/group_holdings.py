"""The blocks that the cache groups of a hybrid model hold, and those at which a hit may end.

The rule is that of ``scheduling.prompts.cache_groups``. Pure. One group of full attention is the *main* one: the view
of the engine has its blocks and their hashes. The others are followed here, by the engine's names alone. At one place
of a prompt the blocks of all groups have one name; a longer block has the name of the main group's block that ends
where it ends. So no token is counted here: an event of a group of windows, which has tokens for blocks that it does
not name, needs no explanation, nor does one that comes before that of the main group.

A window may have blocks shorter than the main ones. Their names inside of a main block are in no event that has their
place: they are computed (``engine_names``) from the main block's token ids, as far as a hit that ends there needs them.
The engine's name of the main block shows whether they are right.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dualmap.scheduling.prompts.cache_groups import CacheGroup, GroupKind
from dualmap.workers.kv_events.engine_names import ROOT_HASHES, name_of, unit_hashes
from dualmap.workers.kv_events.entries import KNOWN, NAME

KINDS: Final = {
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
}
"""Kinds of groups whose rule is known, by vLLM's names."""


WAITS_BLOCKS: Final = 256
"""Blocks of full attention after which a group that has not shown up is one that caches nothing."""
_MAIN, _GROUP, _LINK, _CHAIN = b"m", b"g", b"l", b"c"
"""Tiers of entries. The main group: its number; the tokens of a block. Another group: its number; its window, and its
kind with its block's tokens. A link: a block's name; that of the block before it, and the number of blocks up to it.
Where a window has shorter blocks than the main group, by a main block's name also a chain, which is no pair of numbers:
the whole hash that the engine has of it, and each name inside of it behind the tokens from there to its end."""
_HASH_BYTES: Final = 32
_PART: Final = struct.Struct(">IQ")
_COPIES: Final = 128
"""The tier of copies in a group other than the main one is this plus the group's number; their entry has no hash."""
_ORDER: Final = (*GroupKind,)
_SIZE_BITS: Final = 24
MOST_STEP_TOKENS: Final = 1 << _SIZE_BITS
"""The largest common multiple of groups' blocks that is believed: beyond all contexts. It grows with every new size."""


UNLIKE_NAMES: Final = (
    "a window's blocks are shorter than full attention's, and the engine's names are not vLLM's own by default"
    " (sha256, no PYTHONHASHSEED but 0 or pools.hash_seed, no --prefix-match-unit)"
)


class AmbiguousEventsError(ValueError):
    """The events do not show which prompts a block serves; the instance can only be estimated."""


def group_of(kind: str, block_tokens: int, window_tokens: int) -> CacheGroup:
    """Raises AmbiguousEventsError where no rule for its hits is known."""
    known = KINDS.get(kind)
    if known is None:
        raise AmbiguousEventsError(f"hits of a cache group of kind {kind or 'unknown'!r} are not known")
    if block_tokens < 1 or (known is GroupKind.WINDOW and window_tokens < 1):
        raise AmbiguousEventsError(f"the engine reports a cache group of kind {kind!r} without its size")
    return CacheGroup(known, block_tokens, window_tokens if known is GroupKind.WINDOW else 0)


class _Alike:
    """Groups of one kind and size: a hit needs a block in all of them."""

    def __init__(self, group: CacheGroup, main_block_tokens: int) -> None:
        self.group = group
        self.stride = max(1, group.block_tokens // main_block_tokens)
        """Blocks of the main group in one of theirs."""
        self.parts = max(1, main_block_tokens // group.block_tokens)
        """Blocks of theirs in one of the main group."""
        self.copies: dict[int, dict[int, int]] = {}
        """Copies of each block, by group and name."""
        self.runs: dict[int, int] = {}
        """Consecutive blocks of a window that are held up to the end of this one, as many as a hit needs at most; a run
        that begins with the prompt counts as long enough."""

    @property
    def inside(self) -> range:
        """Tokens before the end of a main block at which blocks end that a hit needs, that end aside."""
        size = self.group.block_tokens
        return range(size, size * min(self.parts, self.group.needed_blocks), size)

    def hold(self, name: int) -> bool:
        return all(name in held for held in self.copies.values())


class GroupHoldings:
    """The groups beside the main one, and the links between its blocks."""

    def __init__(self, main: int, block_tokens: int, roots: Sequence[bytes] = ROOT_HASHES) -> None:
        """``roots`` are the engine's hashes that may be before a prompt's first block."""
        self._roots = roots
        self.main = main
        """The number of the main group."""
        self.block_tokens = block_tokens
        """The size of a block of the main group."""
        self._alike: dict[CacheGroup, _Alike] = {}
        self._of_group: dict[int, _Alike] = {}
        self._links: dict[int, tuple[int | None, int]] = {}
        """The block before each block of the main group, and the number of blocks up to it."""
        self._children: defaultdict[int, set[int]] = defaultdict(set)
        self._chains: dict[int, bytes] = {}
        """The engine's whole hash of each block of the main group of which it could be computed."""
        self._parts: dict[int, dict[int, int]] = {}
        """The names inside of each of these blocks that a hit needs, by the tokens from there to its end."""
        self._owners: defaultdict[int, set[int]] = defaultdict(set)
        """The main blocks that have a name inside of them, by that name: prompts may part after it."""
        self._dirty: set[int] = set()
        """Names whose blocks came or went since ``turned`` was last called."""
        self._touched: set[tuple[int, int]] = set()
        """Groups and names whose copies changed since the entries were last taken."""
        self._links_touched: set[int] = set()
        self._groups_touched = True
        self._waits = main > 0
        """Whether groups with lower numbers than the main one have not shown up yet: a short prompt fills none of their
        blocks."""
        self.step_tokens = block_tokens
        self._unit_tokens = block_tokens
        """The tokens that each of the engine's hashes covers."""
        self._inside: set[int] = set()
        """Tokens before the end of a main block at which shorter blocks of windows end that a hit needs."""

    def __len__(self) -> int:
        """Names that the store has to keep."""
        return len(self._links) + len(self._chains) + self.blocks + len(self._of_group) + 1

    @property
    def blocks(self) -> int:
        """Blocks that the other groups hold."""
        return sum(len(held) for alike in self._alike.values() for held in alike.copies.values())

    @property
    def changed(self) -> int:
        """The number of entries that changed since they were last taken, the groups aside."""
        return len(self._touched) + len(self._links_touched)

    def _add(self, number: int, group: CacheGroup) -> _Alike:
        """Follow a group from now on. Raises AmbiguousEventsError."""
        if not 0 <= number < 256 - _COPIES:
            raise AmbiguousEventsError(f"the engine has a cache group of number {number}")
        if group.kind is GroupKind.FULL and group.block_tokens != self.block_tokens:
            raise AmbiguousEventsError("cache groups of full attention have unequal blocks")
        if group.block_tokens % self.block_tokens and self.block_tokens % group.block_tokens:
            raise AmbiguousEventsError(
                "a cache group's blocks are no multiple of full attention's, and no part of them"
            )
        step_tokens = math.lcm(self.step_tokens, group.block_tokens)
        if step_tokens > MOST_STEP_TOKENS:
            raise AmbiguousEventsError(f"hits would end at multiples of {step_tokens:.3g} tokens")
        alike = self._alike.setdefault(group, _Alike(group, self.block_tokens))
        alike.copies[number] = {}
        self._of_group[number] = alike
        self.step_tokens = step_tokens
        unit_tokens, inside = math.gcd(self._unit_tokens, group.block_tokens), self._inside | {*alike.inside}
        if (unit_tokens, inside) != (self._unit_tokens, self._inside):
            self._unit_tokens, self._inside = unit_tokens, inside
            for name in [*self._chains]:
                self._forget_chain(name)
        self._dirty.update(self._links)
        self._groups_touched = True
        self._waits = self._waits and not all(each in self._of_group for each in range(self.main))
        return alike

    # what comes and goes ---------------------------------------------------------------------------------------------
    def store(self, number: int, group: CacheGroup, names: Iterable[int]) -> None:
        """A group stored blocks, or none: then the group alone is known by it. Raises AmbiguousEventsError."""
        alike = self._of_group.get(number) or self._add(number, group)
        if alike.group != group:
            raise AmbiguousEventsError("hits end inside of blocks (--prefix-match-unit), whose places are not known")
        copies = alike.copies[number]
        for name in names:
            copies[name] = copies.get(name, 0) + 1
            self._touch(number, name)

    def remove(self, number: int, names: Iterable[int]) -> None:
        if number not in self._of_group:
            return
        copies = self._of_group[number].copies[number]
        for name in names:
            held = copies.get(name, 0)
            if held > 1:
                copies[name] = held - 1
            elif held:
                del copies[name]
            self._touch(number, name)

    def is_part(self, block_tokens: int) -> bool:
        """Whether a block of the main group with so few tokens is a part of one that no hit ends at. vLLM reports the
        last part of each prompt where another group's blocks are shorter; hits end there only with states that have
        longer blocks than that (fine mode)."""
        has_long_states = any(
            alike.group.kind is GroupKind.STATE and alike.group.block_tokens > block_tokens
            for alike in self._alike.values()
        )
        return block_tokens == self._unit_tokens < self.block_tokens and not has_long_states

    def with_blocks_of(self, block_tokens: int) -> GroupHoldings:
        """Return these groups beside a main one of longer blocks, none of which has come.

        Raises:
            AmbiguousEventsError: they have no place beside such blocks.
        """
        found = GroupHoldings(self.main, block_tokens, self._roots)
        for number, alike in self._of_group.items():
            found.store(number, alike.group, ())
            found._of_group[number].copies[number] = alike.copies[number]
        found._links_touched = {*self._links, *self._links_touched}
        found._touched = {(number, name) for number, alike in self._of_group.items() for name in alike.copies[number]}
        return found

    def _touch(self, number: int, name: int) -> None:
        self._dirty.add(name)
        self._dirty.update(self._owners.get(name, ()))
        self._touched.add((number, name))

    def link(self, name: int, parent: int | None, token_bytes: bytes = b"", extra: bytes = b"") -> None:
        """A block of the main group came, after this one. Without a known parent it is never a hit end. Raises
        AmbiguousEventsError."""
        if parent is not None and parent not in self._links:
            return
        if self._inside and name not in self._chains:
            self._compute_names(name, parent, token_bytes, extra)
        if name not in self._links:
            self._links[name] = (parent, 1 if parent is None else self._links[parent][1] + 1)
            if parent is not None:
                self._children[parent].add(name)
            self._links_touched.add(name)
        self._dirty.add(name)
        if self._waits and len(self._links) >= WAITS_BLOCKS:
            self._waits = False
            self._dirty.update(self._links)

    def _compute_names(self, name: int, parent: int | None, token_bytes: bytes, extra: bytes) -> None:
        """Compute the names inside of a block, unless the hash before it is not known."""
        befores = self._roots if parent is None else [self._chains[parent]] if parent in self._chains else ()
        for before in befores:
            hashes = unit_hashes(before, token_bytes, self._unit_tokens, extra, begins=parent is None)
            if hashes and name_of(hashes[-1]) == name:
                break
        else:
            if parent is None and not extra:
                raise AmbiguousEventsError(UNLIKE_NAMES)
            return  # the keys of an adapter, or others that are not known
        self._chains[name] = hashes[-1]
        self._links_touched.add(name)
        self._parts[name] = {tokens: name_of(hashes[-1 - tokens // self._unit_tokens]) for tokens in self._inside}
        for part in self._parts[name].values():
            self._owners[part].add(name)

    def _forget_chain(self, name: int) -> None:
        if self._chains.pop(name, None) is None:
            return
        for part in self._parts.pop(name).values():
            self._owners[part].discard(name)
            if not self._owners[part]:
                del self._owners[part]
        self._links_touched.add(name)
        self._dirty.add(name)

    def unlink(self, name: int) -> None:
        """The last copy of a block of the main group went."""
        link = self._links.pop(name, None)
        if link is None:
            return
        self._forget_chain(name)
        parent, _ = link
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(name)
            if not siblings:
                del self._children[parent]
        self._links_touched.add(name)
        self._dirty.add(name)

    def clear(self) -> None:
        """Everything went; the groups stay known."""
        for alike in self._alike.values():
            alike.runs.clear()
            for held in alike.copies.values():
                held.clear()
        self._links.clear()
        self._children.clear()
        self._chains.clear()
        self._parts.clear()
        self._owners.clear()
        self._dirty.clear()
        self._touched.clear()
        self._links_touched.clear()
        self._groups_touched = True  # the store drops what it has of them too

    # hits ----------------------------------------------------------------------------------------------------------
    def turned(self) -> set[int]:
        """Names at which a hit may end now and could not before, or the reverse; some others may be among them."""
        turned, self._dirty = self._dirty, set()
        for alike in self._alike.values():
            if alike.group.kind is GroupKind.WINDOW:
                turned |= self._renew_runs(alike, turned)
        return turned

    def holds(self, name: int) -> bool:
        """Whether the other groups of full attention hold a block of the main one."""
        return all(alike.hold(name) for alike in self._alike.values() if alike.group.kind is GroupKind.FULL)

    def is_end(self, name: int) -> bool:
        """Whether a hit may end after this block of the main group."""
        link = self._links.get(name)
        if link is None or self._waits or link[1] * self.block_tokens % self.step_tokens:
            return False
        for alike in self._alike.values():
            kind, needed = alike.group.kind, alike.group.needed_blocks
            if kind is GroupKind.WINDOW and alike.runs.get(name, 0) < needed:
                return False
            if kind is GroupKind.STATE and not alike.hold(name):
                return False
        return True

    def _renew_runs(self, alike: _Alike, names: Iterable[int]) -> set[int]:
        """Compute the runs of these blocks again, and of those after them as far as they change; the changed ones."""
        changed, runs, waiting = set(), alike.runs, [*names]
        while waiting:
            name = waiting.pop()
            run = self._run(alike, name)
            if run != runs.get(name, 0):
                if run:
                    runs[name] = run
                else:
                    del runs[name]
                changed.add(name)
                waiting += self._after(name, alike.stride)
        return changed

    def _run(self, alike: _Alike, name: int) -> int:
        link = self._links.get(name)
        if link is None or link[1] % alike.stride or not alike.hold(name):
            return 0
        needed = alike.group.needed_blocks
        held = 1
        if alike.parts > 1:
            parts = self._parts.get(name, {})
            for tokens in alike.inside:
                part = parts.get(tokens)
                if part is None or not alike.hold(part):
                    return held
                held += 1
            if held >= needed:
                return needed
        if link[1] == alike.stride:
            return needed
        before: int | None = name
        for _ in range(alike.stride):
            link = None if before is None else self._links.get(before)
            before = None if link is None else link[0]
        return min(needed, held + (0 if before is None else alike.runs.get(before, 0)))

    def _after(self, name: int, blocks: int) -> list[int]:
        """Blocks of the main group that end so many blocks after this one."""
        names = [name]
        for _ in range(blocks):
            names = [child for each in names for child in self._children.get(each, ())]
        return names

    # entries that the store keeps ------------------------------------------------------------------------------------
    def take_entries(self, *, every: bool) -> dict[bytes, bytes]:
        """All entries, or those that changed since the last call, the values of what went empty."""
        entries: dict[bytes, bytes] = {}
        if every or self._groups_touched:
            entries[NAME.pack(_MAIN, self.main)] = KNOWN.pack(0, self.block_tokens)
            for number, alike in self._of_group.items():
                group = alike.group
                sizes = _ORDER.index(group.kind) << _SIZE_BITS | group.block_tokens
                entries[NAME.pack(_GROUP, number)] = KNOWN.pack(group.window_tokens, sizes)
        pairs = self._touched
        if every:
            pairs = {(number, name) for number, alike in self._of_group.items() for name in alike.copies[number]}
        for number, name in pairs:
            held = self._of_group[number].copies[number].get(name)
            entries[NAME.pack(bytes((_COPIES + number,)), name)] = b"" if held is None else KNOWN.pack(0, held)
        for name in self._links if every else self._links_touched:
            link = self._links.get(name)
            entries[NAME.pack(_LINK, name)] = b"" if link is None else KNOWN.pack(link[0] or 0, link[1])
            if self._inside:
                parts = self._parts.get(name, {}).items()
                chain = [self._chains.get(name, b""), *(_PART.pack(tokens, part) for tokens, part in parts)]
                entries[NAME.pack(_CHAIN, name)] = b"".join(chain)
        self._groups_touched = False
        self._touched.clear()
        self._links_touched.clear()
        return entries

    @classmethod
    def restored(cls, entries: Mapping[bytes, bytes], roots: Sequence[bytes] = ROOT_HASHES) -> GroupHoldings | None:
        """What an earlier subscriber knew; None where there was one group."""
        by_tier: defaultdict[bytes, dict[int, tuple[int, int]]] = defaultdict(dict)
        chains: dict[int, bytes] = {}
        for packed, known in entries.items():
            tier, name = NAME.unpack(packed)
            if tier == _CHAIN:
                chains[name] = known
            else:
                by_tier[tier][name] = KNOWN.unpack(known)
        if not by_tier[_MAIN]:
            return None
        ((main, (_, block_tokens)),) = by_tier[_MAIN].items()
        found = cls(main, block_tokens, roots)
        for number, (window_tokens, sizes) in by_tier[_GROUP].items():
            kind, size = _ORDER[sizes >> _SIZE_BITS], sizes & ((1 << _SIZE_BITS) - 1)
            held = by_tier[bytes((_COPIES + number,))]
            copies = found._add(number, CacheGroup(kind, size, window_tokens)).copies[number]
            copies |= {name: count for name, (_, count) in held.items()}
        for name, (parent, depth) in by_tier[_LINK].items():
            found._links[name] = (None if depth == 1 else parent, depth)
            if depth > 1:
                found._children[parent].add(name)
        for name, chain in chains.items():
            found._chains[name] = chain[:_HASH_BYTES]
            found._parts[name] = dict(_PART.iter_unpack(chain[_HASH_BYTES:]))
            for part in found._parts[name].values():
                found._owners[part].add(name)
        found._waits = found._waits and len(found._links) < WAITS_BLOCKS
        found._dirty.update(found._links)
        found._groups_touched = False
        return found

    @property
    def described(self) -> str:
        """The groups, for people."""
        kinds = [f"{alike.group.kind} {alike.group.block_tokens}" for alike in self._of_group.values()]
        return ", ".join([f"full {self.block_tokens}", *kinds])
