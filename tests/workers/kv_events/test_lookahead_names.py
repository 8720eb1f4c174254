"""Engines with a speculative model, whose names of blocks cover tokens after them: the events of vLLM 0.33."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from dualmap.scheduling.prompts.engine_blocks import BlockExtras, Medium, engine_chain
from dualmap.statestore.kv_views import KvChange
from dualmap.workers.kv_events.decoding import read_batch
from dualmap.workers.kv_events.engine_view import EngineView

TOKENS = 4
Prompt = tuple[int, ...]


class Speculative:
    """An engine whose draft layers read so many tokens ahead. A block is named when these tokens are known."""

    def __init__(self, ahead: int, groups: tuple[str, ...]) -> None:
        self.ahead = ahead
        self.groups = groups
        self.held: list[dict[Prompt, None]] = [{} for _ in groups]
        self.names: dict[Prompt, int] = {}

    def ends(self, prompt: Prompt) -> range:
        return range(TOKENS, len(prompt) - self.ahead + 1, TOKENS)

    def name(self, prompt: Prompt, end: int) -> int:
        return self.names.setdefault(prompt[: end + self.ahead], len(self.names) + 1)

    def run(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Compute a prompt: its blocks of full attention are stored, and its last state."""
        events = []
        for number, (kind, held) in enumerate(zip(self.groups, self.held, strict=True)):
            ends = [*self.ends(prompt)]
            kept = [
                end
                for end in (ends if kind == "full_attention" else ends[-1:])
                if prompt[: end + self.ahead] not in held
            ]
            if not kept:
                continue
            first = kept[0] - TOKENS
            held |= {prompt[: end + self.ahead]: None for end in kept}
            event = {
                "type": "BlockStored",
                "block_hashes": [self.name(prompt, end) for end in kept],
                "parent_block_hash": self.name(prompt, first) if first else None,
                "token_ids": prompt[first : kept[-1]],
                "block_size": TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * len(kept),
                "group_idx": number,
                "kv_cache_spec_kind": kind,
                "lookahead_token_ids": [prompt[end : end + self.ahead] for end in kept],
            }
            events.append(event)
        return events

    def evict(self, rng: Random) -> list[dict[str, Any]]:
        number = rng.randrange(len(self.groups))
        held = self.held[number]
        inner = {each[:end] for each in held for end in range(self.ahead, len(each), TOKENS)}
        leaves = [each for each in held if each not in inner] if self.groups[number] == "full_attention" else [*held]
        if not leaves:
            return []
        gone = rng.choice(leaves)
        del held[gone]
        return [{"type": "BlockRemoved", "block_hashes": [self.names[gone]], "medium": "GPU", "group_idx": number}]

    def hit(self, prompt: Prompt) -> int:
        """Tokens that the engine would find of a prompt."""
        full = self.held[self.groups.index("full_attention")]
        found = 0
        for end in self.ends(prompt):
            if prompt[: end + self.ahead] not in full:
                break
            states = [held for held, kind in zip(self.held, self.groups, strict=True) if kind == "mamba"]
            if all(prompt[: end + self.ahead] in held for held in states):
                found = end
        return found

    def names_held(self, block: Prompt) -> list[Prompt]:
        return [each for each in self.held[-1] if each[: -self.ahead] == block]

    def contents(self) -> set[int]:
        full = self.held[self.groups.index("full_attention")]
        return {engine_chain(each[: len(each) - self.ahead], TOKENS).hashes[-1] for each in full}


class Listed:
    def __init__(self) -> None:
        self.ends: dict[int, bool] = {}
        self.entries: dict[bytes, bytes] = {}

    def apply(self, change: KvChange) -> None:
        assert change.turned == len(self.ends.keys() & {*change.stored, *change.inner}) * bool(change.hit_step_tokens)
        assert not self.ends.keys() & {*change.stored} or change.hit_step_tokens
        self.ends |= dict.fromkeys(change.stored, True) | dict.fromkeys(change.inner, False)
        for block in change.removed:
            self.ends.pop(block, None)
        self.entries = {name: known for name, known in {**self.entries, **change.names}.items() if known}

    def hit(self, prompt: Prompt) -> int:
        found = 0
        for place, block in enumerate(engine_chain(prompt, TOKENS).hashes[: len(prompt) // TOKENS]):
            if block not in self.ends:
                break
            found = (place + 1) * TOKENS if self.ends[block] else found
        return found


@pytest.mark.parametrize("groups", [("full_attention",), ("mamba", "full_attention")])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_block_counts_while_one_of_its_names_is_held(groups: tuple[str, ...], ahead: int) -> None:
    """Prompts of a tree that often part at the end of a block. Too much is expected only where a prompt is the first to
    part from another one there; with one group, whatever prompt parts there, and no more than that block."""
    rng, outcomes = Random(f"{groups}/{ahead}"), Counter[str]()
    engine, view, listed = Speculative(ahead, groups), EngineView(), Listed()
    for number in range(600):
        prompt = tuple(int(place + rng.randrange(3) > 9) for place in range(rng.randrange(4, 30)))
        expected, found = listed.hit(prompt), engine.hit(prompt)
        outcomes["more" if expected > found else "less" if expected < found else "equal"] += 1
        if expected > found:
            assert prompt[: expected + ahead] not in engine.held[-1]
            assert expected - found == TOKENS or len(groups) > 1
            assert len(groups) == 1 or len(engine.names_held(prompt[:expected])) == 1

        events = engine.run(prompt)
        for _ in range(rng.randrange(6)):
            events += engine.evict(rng)
        view.apply(read_batch(number, msgpack.packb([1.0, events, 0])))
        listed.apply(view.take_change(number, 1.0)[0])
        assert {*listed.ends} == engine.contents()
        if rng.random() < 0.1:
            view = EngineView(listed.entries)
    assert outcomes["equal"] > 300
    assert outcomes["less"] == 0 or len(groups) > 1


def test_a_medium_that_begins_after_a_block_is_none_of_its_own() -> None:
    """The engine's keys of a block cover the tokens after it; the fleet's do not."""
    ids = tuple(range(8))
    stored = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": ids,
        "block_size": TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
        "extra_keys": [[["image", 4]], [["image", 0]]],
        "lookahead_token_ids": [[4], [8]],
    }  # fmt: skip
    view = EngineView()
    view.apply(read_batch(0, msgpack.packb([1.0, [stored], 0])))

    change, _ = view.take_change(0, 1.0)

    extras = BlockExtras.of_media([Medium("image", 4, 4)], TOKENS)
    assert list(change.stored) == list(engine_chain(ids, TOKENS, extras).hashes)
