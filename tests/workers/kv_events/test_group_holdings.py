"""Blocks of hybrid models: which are listed, and where a hit may end, against the rule of the engine."""

from __future__ import annotations

import pickle
from array import array
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from math import gcd, lcm
from random import Random
from typing import Any

import pytest

from dualmap.scheduling.prompts.engine_blocks import encode_extra_keys, engine_chain
from dualmap.scheduling.values import replaced
from dualmap.statestore.kv_views import KvChange
from dualmap.workers.kv_events import engine_view
from dualmap.workers.kv_events.decoding import Adapter, Batch, Cleared, Event, Removed, Stored
from dualmap.workers.kv_events.engine_names import root_hashes
from dualmap.workers.kv_events.engine_view import UNPLACED_BLOCKS, EngineView
from dualmap.workers.kv_events.group_holdings import WAITS_BLOCKS, AmbiguousEventsError

FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"
TOKENS = 4


def name_of(prompt: tuple[int, ...], unit: int, salt: str | None = None, root: str = "vllm-none-hash") -> int:
    """vLLM's name of the block that ends a prompt."""
    block_hash, keys = sha256(pickle.dumps(root, 5)).digest(), None if salt is None else (("cache_salt", salt),)
    for first in range(0, len(prompt), unit):
        block_hash = sha256(pickle.dumps((block_hash, prompt[first : first + unit], keys), 5)).digest()
        keys = None
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1)


class Hybrid:
    """An engine with some groups. A block is named by the prompt that it ends."""

    def __init__(self, *groups: tuple[str, int, int]) -> None:
        """Kind, tokens of a block and window of each."""
        self.groups = groups
        self.held: list[Counter[tuple[int, ...]]] = [Counter() for _ in groups]
        self.unit = gcd(*(size for _, size, _ in groups))
        self.salt: str | None = None
        self.root = "vllm-none-hash"

    def name(self, prompt: tuple[int, ...]) -> int:
        return name_of(prompt, self.unit, self.salt, self.root)

    def store(self, number: int, prompt: tuple[int, ...], first: int, kept: set[int] | None = None) -> Stored:
        """Blocks of one group from the block ``first`` on; of these only those that are kept."""
        kind, size, window = self.groups[number]
        ends = range((first + 1) * size, len(prompt) + 1, size)
        blocks = [prompt[:end] for end in ends if kept is None or end // size - 1 in kept]
        self.held[number].update(blocks)
        parent = self.name(prompt[: first * size]) if first else None
        tokens = array("I", prompt[first * size : ends[-1] if ends else first * size]).tobytes()
        names = [self.name(block) for block in blocks]
        keys = [[self.salt] if self.salt and end == size else None for end in ends[: len(names)]]
        return Stored(
            names,
            parent,
            tokens,
            block_tokens=size,
            extras=[*map(encode_extra_keys, keys)],
            tier=None,
            group=number,
            translatable=True,
            kind=kind,
            window_tokens=window,
        )

    def store_part(self, number: int, prompt: tuple[int, ...]) -> Stored:
        """The last unit of a prompt, which ends inside of a block of the group."""
        kind, before = self.groups[number][0], prompt[: -self.unit]
        tokens = array("I", prompt[-self.unit :]).tobytes()
        return Stored(
            [self.name(prompt)],
            self.name(before) if before else None,
            tokens,
            block_tokens=self.unit,
            extras=[b""],
            tier=None,
            group=number,
            translatable=True,
            kind=kind,
        )

    def remove(self, number: int, block: tuple[int, ...]) -> Removed:
        self.held[number][block] -= 1
        self.held[number] += Counter()
        return Removed([self.name(block)], None, number)

    @property
    def main(self) -> int:
        return next(place for place, (kind, _, _) in enumerate(self.groups) if kind == FULL)

    def holds(self, number: int, block: tuple[int, ...]) -> bool:
        return self.held[number][block] > 0

    def ends_at(self, prompt: tuple[int, ...]) -> bool:
        """Whether the groups hold what a hit of this prompt needs, full attention aside."""
        if len(prompt) % lcm(*(size for _, size, _ in self.groups)):
            return False
        for number, (kind, size, window) in enumerate(self.groups):
            if kind == STATE and not self.holds(number, prompt):
                return False
            first = max(0, len(prompt) - -((1 - window) // size) * size) if kind == WINDOW else len(prompt)
            if not all(self.holds(number, prompt[: end + size]) for end in range(first, len(prompt), size)):
                return False
        return True

    def listed(self) -> dict[int, bool]:
        """The fleet's hash of each block that every group of full attention holds with all before it, and whether a
        hit may end there."""
        full = [held for held, (kind, _, _) in zip(self.held, self.groups, strict=True) if kind == FULL]
        blocks = {block for block in full[0] if all(held[block] > 0 for held in full)}
        size = self.groups[self.main][1]
        whole = [block for block in blocks if all(block[:end] in blocks for end in range(size, len(block), size))]
        return {engine_chain(block, size).hashes[-1]: self.ends_at(block) for block in whole}


class Store:
    """What the store lists after each change, and the entries that it keeps."""

    def __init__(self) -> None:
        self.listed: dict[int, bool] = {}
        self.entries: dict[bytes, bytes] = {}
        self.step_tokens = 0

    def apply(self, change: KvChange, cleared: bool) -> None:
        if cleared:
            self.listed, self.entries = {}, {}
        before = len(self.listed.keys() & {*change.stored, *change.inner})
        assert change.turned == before
        self.listed |= dict.fromkeys(change.stored, True) | dict.fromkeys(change.inner, False)
        for block in change.removed:
            self.listed.pop(block, None)
        assert not {*change.removed} & {*change.stored, *change.inner}
        self.entries = {**({} if change.all_names else self.entries), **change.names}
        self.entries = {name: known for name, known in self.entries.items() if known}
        self.step_tokens = change.hit_step_tokens


def apply(view: EngineView, store: Store, *events: Event) -> None:
    view.apply(Batch(1, 2.0, events, 0))
    store.apply(*view.take_change(1, 2.0))


MODELS = {
    "windows": ((WINDOW, 4, 9), (WINDOW, 4, 9), (FULL, 4, 0)),
    "unequal blocks": ((WINDOW, 8, 13), (FULL, 4, 0)),
    "states": ((STATE, 4, 0), (STATE, 4, 0), (FULL, 4, 0)),
    "shorter windows": ((WINDOW, 2, 6), (WINDOW, 2, 6), (FULL, 4, 0)),
    "windows of parts": ((FULL, 4, 0), (WINDOW, 2, 4), (WINDOW, 4, 8), (STATE, 8, 0)),
    "longer states first": ((FULL, 4, 0), (STATE, 8, 0)),
    "all": ((FULL, 4, 0), (WINDOW, 4, 6), (STATE, 8, 0), (WINDOW, 8, 20), (FULL, 4, 0)),
}


@pytest.mark.parametrize("model", MODELS)
def test_the_view_is_what_the_engine_would_hit(model: str) -> None:
    """Random prompts of a tree, stored group by group in parts and removed block by block; now and then another
    subscriber takes over."""
    rng, main_tokens = Random(model), next(size for kind, size, _ in MODELS[model] if kind == FULL)
    engine, view, store = Hybrid(*MODELS[model]), EngineView(), Store()
    ends = 0
    for _ in range(300):
        length = main_tokens * rng.randrange(1, 14)
        prompt = tuple(int(place > rng.randrange(60)) for place in range(length))
        events: list[Event] = []
        for number, (kind, size, _) in enumerate(engine.groups):
            held = 0
            while engine.holds(number, prompt[: (held + 1) * size]) and (held + 1) * size <= length:
                held += 1
            kept = None if kind == FULL else {block for block in range(length // size) if rng.random() < 0.7}
            events.append(engine.store(number, prompt, rng.randrange(held + 1) if kind == FULL else 0, kept))
            longest = sorted(engine.held[number], key=len)[rng.randrange(4) :]
            events += [engine.remove(number, block) for block in longest if rng.random() < 0.3]
        apply(view, store, *events)
        listed = engine.listed()  # behind a gap nothing is a hit, whatever is said of it
        assert {block: store.listed[block] for block in listed} == listed
        assert len(store.listed) == len(view) or len(engine.groups) == 5
        ends += sum(listed.values())
        if rng.random() < 0.1:
            store.apply(*view.take_change(1, 2.0, all_names=True))
        if rng.random() < 0.1:
            view = EngineView(store.entries)
    assert ends > 100
    assert store.step_tokens == lcm(*(size for _, size, _ in MODELS[model]))
    assert view.groups.startswith(f"full {main_tokens}")


def test_other_groups_may_be_reported_first_and_without_blocks() -> None:
    engine, view, store = Hybrid((WINDOW, 4, 5), (FULL, 4, 0)), EngineView(), Store()
    prompt = tuple(range(12))

    apply(view, store, engine.store(0, prompt[:8], 0, set()))
    apply(view, store, engine.store(0, prompt, 2, {2}), engine.store(1, prompt, 0))

    assert [*store.listed.values()].count(True) == 1
    assert store.listed == engine.listed()


def test_a_cleared_cache_is_empty_in_every_group() -> None:
    engine, view, store = Hybrid((STATE, 4, 0), (FULL, 4, 0)), EngineView(), Store()
    prompt = tuple(range(12))
    apply(view, store, engine.store(0, prompt, 0), engine.store(1, prompt, 0))

    apply(view, store, Cleared(), engine.store(1, prompt, 0))
    restored = EngineView(store.entries)

    assert [*store.listed.values()] == [False] * 3
    apply(restored, store, engine.store(0, prompt, 0, {1}))
    assert sorted(store.listed.values()) == [False, False, True]


def test_a_group_that_shows_up_late_leaves_what_came_before_inner() -> None:
    engine, view, store = Hybrid((FULL, 4, 0), (STATE, 4, 0)), EngineView(), Store()
    prompt = tuple(range(12))
    apply(view, store, engine.store(0, prompt[:8], 0))
    alone = {*store.listed.values()}

    apply(view, store, engine.store(1, prompt, 0, {1, 2}))

    assert (alone, [*store.listed.values()]) == ({True}, [False, False])


def test_no_hit_is_expected_before_all_groups_have_shown_up_or_never_will() -> None:
    engine, view, store = Hybrid((STATE, 8, 0), (STATE, 4, 0), (FULL, 4, 0)), EngineView(), Store()
    prompt = tuple(range(8))
    apply(view, store, engine.store(1, prompt[:4], 0), engine.store(2, prompt[:4], 0))
    early = {*store.listed.values()}
    apply(view, store, *(engine.store(number, prompt, first) for number, first in ((0, 0), (1, 1), (2, 1))))

    assert early == {False}
    assert store.listed == engine.listed()
    assert any(store.listed.values())

    alone, listed = EngineView(), Store()
    many = Hybrid((STATE, 4, 0), (FULL, 4, 0))
    apply(alone, listed, many.store(1, tuple(range(4 * WAITS_BLOCKS - 4)), 0))
    before = {*listed.listed.values()}
    apply(alone, listed, many.store(1, tuple(range(4 * WAITS_BLOCKS)), WAITS_BLOCKS - 1))
    assert (before, {*listed.listed.values()}) == ({False}, {True})
    heir = EngineView(listed.entries)
    apply(heir, listed, many.store(1, tuple(range(4 * WAITS_BLOCKS + 4)), WAITS_BLOCKS))
    assert {*listed.listed.values()} == {True}, "and another subscriber does not wait again"


def test_groups_of_which_no_hit_has_all_are_refused() -> None:
    """Their blocks have ever larger common multiples, which the store could not read in the end."""
    view = EngineView()
    sizes = (4, 4 * 1009, 4 * 1013, 4 * 1019)
    engine = Hybrid((FULL, 4, 0), *((STATE, size, 0) for size in sizes[1:]))

    with pytest.raises(AmbiguousEventsError, match="would end at multiples"):
        view.apply(Batch(1, 2.0, [engine.store(number, tuple(range(4)), 0) for number in range(4)], 0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "chunked_local_attention"}, "chunked_local_attention"),
        ({"kind": ""}, "unknown"),
        ({"kind": WINDOW, "window_tokens": 0}, "without its size"),
        ({"block_tokens": 0}, "without its size"),
        ({"block_tokens": 6}, "multiple"),
        ({"block_tokens": 3}, "no part"),
        ({"kind": FULL, "block_tokens": 8}, "unequal"),
        ({"group": None}, "number"),
        ({"group": 128}, "number 128"),
    ],
)
def test_a_group_whose_hits_are_not_known_is_named(changes: dict[str, Any], reason: str) -> None:
    view = EngineView()
    fields = {"kind": STATE, "group": 1, "block_tokens": 4} | changes
    first = Stored([1], None, bytes(16), block_tokens=4, extras=[], tier=None, group=0, translatable=True, kind=FULL)
    other = Stored([1], None, bytes(16), extras=[], tier=None, translatable=True, **fields)

    with pytest.raises(AmbiguousEventsError, match=reason):
        view.apply(Batch(1, 2.0, [first, other], 0))


def test_hits_inside_of_blocks_are_refused() -> None:
    view, engine = EngineView(), Hybrid((FULL, 4, 0), (STATE, 4, 0))
    events = [engine.store(0, tuple(range(8)), 0), engine.store(1, tuple(range(8)), 0)]
    view.apply(Batch(1, 2.0, events, 0))

    for group, kind in enumerate((FULL, STATE)):
        partial = Stored(
            [9], None, bytes(8), block_tokens=2, extras=[], tier=None, group=group, translatable=True, kind=kind
        )
        with pytest.raises(AmbiguousEventsError, match="prefix-match-unit"):
            view.apply(Batch(2, 2.0, [partial], 0))


def test_a_model_without_full_attention_is_refused() -> None:
    view = EngineView()
    states = Stored(
        range(UNPLACED_BLOCKS + 1),
        None,
        bytes(16),
        block_tokens=4,
        extras=[],
        tier=None,
        group=0,
        translatable=True,
        kind=STATE,
    )

    with pytest.raises(AmbiguousEventsError, match="no cache group of full attention"):
        view.apply(Batch(1, 2.0, [states], 0))


def test_events_before_any_of_full_attention_are_kept_up_to_a_bound() -> None:
    engine, view = Hybrid((FULL, 4, 0), (WINDOW, 4, 8)), EngineView()
    window = engine.store(1, tuple(range(8)), 0)
    empty = replaced(window, names=(), token_bytes=b"")
    for number in range(UNPLACED_BLOCKS):
        view.apply(Batch(number, 2.0, [empty, Removed((), None, 1)], 0))

    assert len(view._unplaced) == 1
    with pytest.raises(AmbiguousEventsError, match="no cache group of full attention"):
        view.apply(Batch(UNPLACED_BLOCKS, 2.0, [Removed(range(UNPLACED_BLOCKS + 1), None, 1)], 0))


def test_the_blocks_of_all_groups_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_view, "MAX_BLOCKS", 8)
    engine, view = Hybrid((FULL, 4, 0), (WINDOW, 4, 8)), EngineView()
    view.apply(Batch(1, 2.0, [engine.store(0, tuple(range(16)), 0), engine.store(1, tuple(range(16)), 0)], 0))

    with pytest.raises(AmbiguousEventsError, match="over 8 blocks"):
        view.apply(Batch(2, 2.0, [engine.store(1, tuple(range(50, 66)), 0)], 0))


@pytest.mark.parametrize("root", ["vllm-none-hash", "0"])
def test_windows_of_shorter_blocks_end_hits_of_salted_prompts_too(root: str) -> None:
    engine, view, store = Hybrid((WINDOW, 2, 4), (FULL, 4, 0)), EngineView(), Store()
    engine.salt, engine.root = "tenant", root
    prompt = tuple(range(12))

    apply(view, store, engine.store(0, prompt, 0, {4, 5}), engine.store(1, prompt, 0))

    assert [*store.listed.values()].count(True) == 1


def test_windows_of_shorter_blocks_end_hits_with_the_seed_of_the_pool() -> None:
    roots = root_hashes("42")
    engine, view, store = Hybrid((WINDOW, 2, 4), (FULL, 4, 0)), EngineView(roots=roots), Store()
    engine.root = "42"
    prompt = tuple(range(12))
    apply(view, store, engine.store(0, prompt[:8], 0), engine.store(1, prompt[:8], 0))
    heir = EngineView(store.entries, roots=roots)
    other = tuple(range(50, 58))
    apply(heir, store, engine.store(0, other, 0), engine.store(1, other, 0))

    assert store.listed == engine.listed()
    assert [*store.listed.values()] == [True] * 4


def test_windows_of_shorter_blocks_need_the_names_that_vllm_has_by_default() -> None:
    engine, view = Hybrid((WINDOW, 2, 4), (FULL, 4, 0)), EngineView()
    engine.root = "PYTHONHASHSEED"
    prompt = tuple(range(12))

    with pytest.raises(AmbiguousEventsError, match="names are not vLLM's own by default"):
        view.apply(Batch(1, 2.0, [engine.store(1, prompt, 0), engine.store(0, prompt, 0)], 0))


def test_no_hit_ends_behind_an_adapter_where_windows_have_shorter_blocks() -> None:
    """The engine's names cover the path of an adapter, which no event has."""
    engine, view, store = Hybrid((WINDOW, 2, 4), (FULL, 4, 0)), EngineView(), Store()
    engine.root = "path"
    prompt = tuple(range(12))
    adapter, extras = Adapter("a", 1), [encode_extra_keys(["a"])] * 3
    blocks = replace(engine.store(1, prompt, 0), adapter=adapter, extras=extras)

    apply(view, store, engine.store(0, prompt, 0), blocks)

    assert [*store.listed.values()] == [False] * 3


def test_parts_of_blocks_at_the_end_of_prompts_are_left_out_where_windows_have_shorter_blocks() -> None:
    """vLLM announces the last unit of a prompt too, though no hit ends there."""
    engine, view, store = Hybrid((WINDOW, 2, 4), (FULL, 4, 0)), EngineView(), Store()
    short, long = (0, 1), tuple(range(10))

    apply(view, store, engine.store(0, short, 0), engine.store_part(1, short))
    early = {*store.listed}
    apply(view, store, engine.store(0, long, 0), engine.store(1, long, 0), engine.store_part(1, long))
    apply(view, store, Removed([engine.name(short), engine.name(long)], None, 1))

    assert early == {*engine_chain(short, 2).hashes}
    assert store.listed == engine.listed() == dict.fromkeys(engine_chain(long, 4).hashes[:2], True)
    assert len(view) == 2
    again = EngineView(store.entries)
    apply(again, store, engine.remove(0, long[:8]))
    assert store.listed == engine.listed()
    assert sorted(store.listed.values()) == [False, True]


def test_hits_end_inside_of_blocks_where_states_have_longer_blocks_than_windows() -> None:
    engine, view = Hybrid((WINDOW, 2, 4), (STATE, 4, 0), (FULL, 4, 0)), EngineView()
    prompt = tuple(range(6))
    events = [engine.store(number, prompt, 0) for number in range(3)]

    with pytest.raises(AmbiguousEventsError, match="prefix-match-unit"):
        view.apply(Batch(1, 2.0, [*events, engine.store_part(2, prompt)], 0))


def test_a_state_at_a_place_where_none_can_be_is_no_hit_end() -> None:
    engine, view = Hybrid((FULL, 4, 0), (STATE, 8, 0)), EngineView()
    full, states = engine.store(0, tuple(range(16)), 0), engine.store(1, tuple(range(16)), 0)
    odd = replaced(states, names=(engine.name(tuple(range(12))), *states.names))
    view.apply(Batch(1, 2.0, [full, odd], 0))
    change, _ = view.take_change(1, 2.0)

    assert (len(change.stored), len(change.inner)) == (2, 2)
