"""The content of one engine's caches by its events: the engine's names of blocks, and their hashes in the fleet.

Pure. Events are applied one after the other; ``take_change`` returns the resulting change for the store.

An engine may hold a block several times: two running requests compute the same prefix side by side, each copy is
reported as stored, and later each as removed. So copies are counted. Blocks of pools outside the device are counted by
themselves: a pool's block is no hit on the device, and its removal removes nothing there.

The name of an adapter that is pointed at other weights leaves blocks in the cache that no request hits any more. They
have the fleet's hashes of the blocks that take their place, but other names: so a hash stands for the last name that
was stored for it, and a block of an adapter counts as long as its number is the highest that its adapter has had.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import xxhash

from dualmap.scheduling.prompts.engine_blocks import ROOT, TOKEN_BYTES, block_hash
from dualmap.statestore.kv_views import KvChange
from dualmap.workers.kv_events.decoding import Adapter, Batch, Cleared, Removed, Stored

MAX_BLOCKS: Final = 1 << 20
"""Blocks of one instance that are followed at most; 16 million tokens in blocks of 16."""

_DEVICE, _POOL, _ADAPTER = b"d", b"p", b"a"
_NAME = struct.Struct(">cQ")
_KNOWN = struct.Struct(">QI")
"""The fleet's hash and the copies of a device block; or the hash of its adapter's name, and the adapter's number."""
_NO_HASH = 0


class AmbiguousEventsError(ValueError):
    """The events do not show which prompts a block serves; the instance can only be estimated."""


class EngineView:
    """Blocks of one engine. ``names`` as the store keeps them, from an earlier subscriber."""

    def __init__(self, names: Mapping[bytes, bytes] | None = None) -> None:
        self._device: dict[int, tuple[int, int]] = {}
        """The fleet's hash and the number of copies of each block, by the engine's name."""
        self._pool: dict[int, int] = {}
        """Copies by the engine's name."""
        self._adapters: dict[int, tuple[int, int]] = {}
        """The hash of its adapter's name, and the adapter's number, of each device block that has one."""
        self._numbers: dict[int, int] = {}
        """The highest number of each adapter."""
        self._last: dict[int, int] = {}
        """The engine's name that was stored last for the fleet's hash of a block with an adapter."""
        self._listed_before: dict[int, bool] = {}
        """Whether each of these hashes was listed when it was first touched since the last change was taken."""
        self._adapters_touched: set[int] = set()
        self._block_tokens = 0
        self._group: int | None = None
        self._before: dict[int, int | None] = {}
        """The fleet's hash of each device block that was touched since the last change was taken; None: not held."""
        self._removed: dict[int, int] = {}
        """The fleet's hash of each device block that was removed since; some of them were stored again."""
        self._pool_touched: set[int] = set()
        self._cleared = False
        self.orphans = 0
        """Stored blocks whose parent or adapter is unknown: they are not listed."""
        for name, known in (names or {}).items():
            tier, engine_name = _NAME.unpack(name)
            fleet_hash, copies = _KNOWN.unpack(known)
            if tier == _DEVICE:
                self._device[engine_name] = (fleet_hash, copies)
            elif tier == _ADAPTER:
                self._adapters[engine_name] = (fleet_hash, copies)
            else:
                self._pool[engine_name] = copies
        self._restore_adapters()

    def __len__(self) -> int:
        """Blocks that the device holds."""
        return len(self._device)

    @property
    def pool_blocks(self) -> int:
        return len(self._pool)

    @property
    def changed_blocks(self) -> int:
        """The number of blocks that changed since the last change was taken."""
        return len(self._before) + len(self._pool_touched)

    @property
    def named_blocks(self) -> int:
        """Names that the store has to keep."""
        return len(self._device) + len(self._pool) + len(self._adapters)

    def apply(self, batch: Batch) -> None:
        """Raises AmbiguousEventsError."""
        for event in batch.events:
            if isinstance(event, Stored):
                self._store(event) if event.device else self._store_in_pool(event)
            elif isinstance(event, Removed):
                self._remove(event) if event.device else self._remove_from_pool(event)
            elif isinstance(event, Cleared):
                self._clear()
        if len(self._device) > MAX_BLOCKS:
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
                names[_NAME.pack(_DEVICE, name)] = b"" if now is None else _KNOWN.pack(*now)
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
            for name in self._pool_touched:
                copies = self._pool.get(name)
                names[_NAME.pack(_POOL, name)] = b"" if copies is None else _KNOWN.pack(_NO_HASH, copies)
            for name in self._adapters_touched:
                adapter = self._adapters.get(name)
                names[_NAME.pack(_ADAPTER, name)] = b"" if adapter is None else _KNOWN.pack(*adapter)
        cleared, self._cleared = self._cleared, False
        self._before.clear()
        self._removed.clear()
        self._pool_touched.clear()
        self._listed_before.clear()
        self._adapters_touched.clear()
        return KvChange(sequence, published_s, stored, removed, names, all_names), cleared

    def _all_names(self) -> dict[bytes, bytes]:
        names = {_NAME.pack(_DEVICE, name): _KNOWN.pack(*known) for name, known in self._device.items()}
        pool = {_NAME.pack(_POOL, name): _KNOWN.pack(_NO_HASH, copies) for name, copies in self._pool.items()}
        adapters = {_NAME.pack(_ADAPTER, name): _KNOWN.pack(*each) for name, each in self._adapters.items()}
        return names | pool | adapters

    def _store(self, event: Stored) -> None:
        self._check(event)
        parent = ROOT if event.parent is None else self._device.get(event.parent, (None, 0))[0]
        if parent is None or not event.translatable:
            self.orphans += len(event.names)
            return
        device, before, extras, data = self._device, self._before, event.extras, event.token_bytes
        adapter = None if event.adapter is None else self._known_adapter(event.adapter)
        size = event.block_tokens * TOKEN_BYTES
        for place, name in enumerate(event.names):
            parent = block_hash(parent, data[place * size : (place + 1) * size], extras[place] if extras else b"")
            held = device.get(name)
            if name not in before:
                before[name] = None if held is None else held[0]
            device[name] = (parent, 1 if held is None else held[1] + 1)
            if adapter is not None:
                self._store_of_adapter(name, parent, adapter)

    def _check(self, event: Stored) -> None:
        if len(event.token_bytes) != len(event.names) * event.block_tokens * TOKEN_BYTES:
            raise AmbiguousEventsError("token ids of a stored block do not fill it, as with some hybrid models")
        if event.extras and len(event.extras) != len(event.names):
            raise AmbiguousEventsError("there are not as many extra keys as stored blocks")
        if not self._block_tokens:
            self._block_tokens, self._group = event.block_tokens, event.group
        elif event.block_tokens != self._block_tokens or event.group != self._group:
            raise AmbiguousEventsError("stored blocks are of several sizes or groups, as with hybrid models")

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
                if name in self._adapters:
                    self._remove_of_adapter(name, held[0])

    def _clear(self) -> None:
        """Drop the view. The store drops names of the pool too; they are sent again."""
        self._device.clear()
        self._before.clear()
        self._removed.clear()
        self._pool_touched = set(self._pool)
        self._adapters.clear()
        self._last.clear()
        self._listed_before.clear()
        self._adapters_touched.clear()
        self._cleared = True

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
        """Whether a request with the adapter's present weights would hit the block with this hash."""
        name = self._last.get(block)
        if name is None:
            return False
        adapter, number = self._adapters[name]
        return number >= self._numbers.get(adapter, 0)

    # pools ---------------------------------------------------------------------------------------------------------
    def _store_in_pool(self, event: Stored) -> None:
        for name in event.names:
            self._pool[name] = self._pool.get(name, 0) + 1
            self._pool_touched.add(name)
        if len(self._pool) > MAX_BLOCKS:
            raise AmbiguousEventsError(f"the engine reports over {MAX_BLOCKS} blocks in pools")

    def _remove_from_pool(self, event: Removed) -> None:
        for name in event.names:
            copies = self._pool.get(name, 0)
            if copies > 1:
                self._pool[name] = copies - 1
            elif copies:
                del self._pool[name]
            self._pool_touched.add(name)
