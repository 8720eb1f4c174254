"""The blocks that the tiers behind one engine's device hold, by the engine's names.

Pure. A block has the same name in every tier and on the device. Events of tiers may come without tokens, and without
the salt or the adapter that a prompt had, so the fleet's hash of a name is learned from the device's events alone.

An engine announces again what it stores again, and some announce no removal. So a tier is a set, the names that were
announced last at its end, and ends at its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.statestore.kv_views import TierChange
from dualmap.workers.kv_events.entries import KNOWN, NAME

MAX_BLOCKS: Final = 1 << 20
"""Names of one tier that are followed at most."""
_CODES: Final = {Tier.HOST: b"h", Tier.DISK: b"s", Tier.POOL: b"p"}
"""The first byte of a tier's entries. Their value is the fleet's hash, or 0, and 1."""
_TIERS: Final = {code: tier for tier, code in _CODES.items()}
_STANDS_FOR: Final = {
    Tier.HOST: (Tier.HOST, Tier.POOL),
    Tier.DISK: (Tier.DISK, Tier.POOL),
    Tier.POOL: (Tier.POOL, Tier.DISK),
}
"""The tiers of the settings that may be meant by that of an event, the likelier first: AscendStore calls its pool CPU
memory, and a disk may be a mounted share."""
_NO_HASH: Final = 0

HashOf = Callable[[int], int | None]
"""The fleet's hash of a block on the device, by the engine's name."""


class TierHoldings:
    """Names by tier. ``sizes`` are the tokens of each tier that the instance has."""

    def __init__(self, sizes: Mapping[Tier, int]) -> None:
        self._sizes = sizes
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in sizes}
        """The fleet's hash of each name, 0 where it is not known yet; the name that was announced last at the end."""
        self._meant = {
            tier: next((each for each in stands_for if each in sizes), None) for tier, stands_for in _STANDS_FOR.items()
        }
        self._nameless: set[int] = set()
        """Names of which the hash is not known."""
        self._stored: dict[Tier, dict[int, None]] = {tier: {} for tier in sizes}
        """Hashes that were stored since the last change was taken, in their order."""
        self._removed: dict[Tier, dict[int, None]] = {tier: {} for tier in sizes}
        self._touched: dict[Tier, set[int]] = {tier: set() for tier in sizes}
        """Names whose entries changed since."""

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def changed(self) -> int:
        """The number of entries that changed since the last change was taken."""
        return sum(map(len, self._touched.values()))

    def store(self, tier: Tier, names: Iterable[int], hash_of: HashOf, block_tokens: int) -> None:
        """Enter names that were announced, the device's blocks being of so many tokens."""
        meant = self._meant[tier]
        if meant is None:
            return
        held, touched = self._held[meant], self._touched[meant]
        for name in names:
            block = held.pop(name, _NO_HASH) or hash_of(name) or self._known(name)
            held[name] = block
            touched.add(name)
            if block:
                self._enter(meant, block)
            else:
                self._nameless.add(name)
        most = min(MAX_BLOCKS, self._sizes[meant] // max(1, block_tokens))
        while len(held) > most:
            lost = next(iter(held))
            self._drop(meant, lost)
            touched.add(lost)

    def remove(self, tier: Tier, names: Iterable[int]) -> None:
        meant = self._meant[tier]
        if meant is None:
            return
        held, stored, removed = self._held[meant], self._stored[meant], self._removed[meant]
        for name in names:
            if name not in held:
                continue
            block = self._drop(meant, name)
            self._touched[meant].add(name)
            if block:
                stored.pop(block, None)
                removed[block] = None

    def _drop(self, tier: Tier, name: int) -> int:
        """Drop a name from a tier that has it; return its hash. An engine may announce names that its device never has,
        so nothing is kept of one that no tier has any more."""
        block = self._held[tier].pop(name)
        if not block and not any(name in held for held in self._held.values()):
            self._nameless.discard(name)
        return block

    def learn(self, name: int, block: int) -> None:
        """Take the hash of a block that the device has stored."""
        if name not in self._nameless:
            return
        self._nameless.discard(name)
        for tier, held in self._held.items():
            if name in held:
                held[name] = block
                self._touched[tier].add(name)
                self._enter(tier, block)

    def take_change(self, block_tokens: int) -> dict[Tier, TierChange]:
        """The changes since the last call, by tier."""
        changes: dict[Tier, TierChange] = {}
        for tier, tokens in self._sizes.items():
            stored, removed = self._stored[tier], self._removed[tier]
            if stored or removed:
                most_blocks = tokens // block_tokens if block_tokens else 0
                changes[tier] = TierChange(list(stored), list(removed), most_blocks)
                self._stored[tier], self._removed[tier] = {}, {}
        return changes

    def take_entries(self, *, every: bool = False) -> dict[bytes, bytes]:
        """The entries that changed since the last call, or every one."""
        entries: dict[bytes, bytes] = {}
        for tier, held in self._held.items():
            code = _CODES[tier]
            for name in held if every else self._touched[tier]:
                block = held.get(name)
                entries[NAME.pack(code, name)] = b"" if block is None else KNOWN.pack(block, 1)
            self._touched[tier].clear()
        return entries

    def send_again(self) -> None:
        """The store drops the entries: all are changed."""
        for tier, held in self._held.items():
            self._touched[tier] = set(held)

    def restore(self, entries: Mapping[bytes, bytes]) -> None:
        """Enter what an earlier subscriber knew."""
        for entry, known in entries.items():
            code, name = NAME.unpack(entry)
            tier = _TIERS.get(code)
            if tier in self._held:
                self._held[tier][name] = block = KNOWN.unpack(known)[0]
                if not block:
                    self._nameless.add(name)

    def _known(self, name: int) -> int:
        """The hash of a name by what another tier has."""
        return next((block for held in self._held.values() if (block := held.get(name))), _NO_HASH)

    def _enter(self, tier: Tier, block: int) -> None:
        self._removed[tier].pop(block, None)
        self._stored[tier].pop(block, None)
        self._stored[tier][block] = None
