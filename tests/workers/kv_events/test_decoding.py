"""Both encodings of vLLM's events, and what is wrong with them."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

from dualmap.scheduling.estimates.kv_tiers import Tier
from dualmap.scheduling.prompts.engine_blocks import BlockExtras, Medium, encode_extra_keys, engine_chain
from dualmap.workers.kv_events.decoding import (
    Batch,
    Cleared,
    Removed,
    Stored,
    UnreadableEventsError,
    as_cached,
    read_batch,
)
from dualmap.workers.kv_events.engine_view import EngineView
from dualmap.workers.kv_events.group_holdings import AmbiguousEventsError


def batch_of(*events: Any, rank: Any = 0) -> Batch:
    return read_batch(3, msgpack.packb([12.5, events, rank]))


STORED = {
    "type": "BlockStored",
    "block_hashes": [7, 8],
    "parent_block_hash": 6,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, ["salt"]],
    "group_idx": 0,
    "something_new": 1,
}


def as_array(event: dict[str, Any], *names: str) -> list[Any]:
    return [event["type"], *(event[name] for name in names)]


ORDER = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys")


def test_a_map_and_an_array_say_the_same() -> None:
    by_map, by_array = batch_of(STORED), batch_of(as_array(STORED, *ORDER, "group_idx"))

    assert by_map == by_array
    assert (by_map.sequence, by_map.published_s, by_map.rank) == (3, 12.5, 0)
    (stored,) = by_map.events
    assert stored == Stored(
        [7, 8],
        6,
        array("I", [1, 2, 3, 4]).tobytes(),
        block_tokens=2,
        extras=[b"", encode_extra_keys(["salt"])],
        tier=None,
        group=0,
        translatable=True,
    )


def test_an_older_array_lacks_its_last_fields() -> None:
    (stored,) = batch_of(as_array(STORED, *ORDER[:5])).events

    assert isinstance(stored, Stored)
    assert (stored.tier, stored.extras, stored.group, stored.translatable) == (None, [], None, True)


def test_removed_and_cleared_are_read_in_both_forms() -> None:
    removed = Removed([7], None)

    assert batch_of({"type": "BlockRemoved", "block_hashes": [7], "medium": None}).events == [removed]
    assert batch_of(["BlockRemoved", [7]]).events == [removed]
    assert batch_of({"type": "AllBlocksCleared"}, ["AllBlocksCleared"]).events == [Cleared(), Cleared()]


@pytest.mark.parametrize(
    ("where", "tier"),
    [
        ({"medium": None}, None),
        ({"medium": "GPU"}, None),
        ({"medium": "npu", "locality": "LOCAL"}, None),
        ({"medium": "CPU"}, Tier.HOST),
        ({"medium": "STORAGE"}, Tier.DISK),
        ({"medium": "storage", "locality": "REMOTE"}, Tier.POOL),
        ({"medium": "CPU", "locality": "REMOTE"}, Tier.POOL),
        ({"medium": "SHARED_STORAGE"}, Tier.POOL),
    ],
)
def test_media_and_localities_say_the_tier(where: dict[str, str | None], tier: Tier | None) -> None:
    stored, removed = batch_of(STORED | where, {"type": "BlockRemoved", "block_hashes": [7]} | where).events

    assert isinstance(stored, Stored)
    assert isinstance(removed, Removed)
    assert (stored.tier, removed.tier) == (tier, tier)


def test_what_the_device_of_another_instance_has_is_left_out() -> None:
    where = {"medium": "GPU", "locality": "REMOTE"}

    assert batch_of(STORED | where, {"type": "BlockRemoved", "block_hashes": [7]} | where).events == []


@pytest.mark.parametrize("medium", ["tape", "GPUX", " "])
def test_a_memory_that_is_not_known_makes_the_batch_unreadable_and_is_named(medium: str) -> None:
    with pytest.raises(UnreadableEventsError, match=f"a memory that is not known, '{medium}'"):
        batch_of(STORED | {"medium": medium})


def test_hashes_of_bytes_are_folded_to_their_last_eight() -> None:
    (removed,) = batch_of({"type": "BlockRemoved", "block_hashes": [b"x" * 24 + (5).to_bytes(8, "big"), -1]}).events

    assert removed == Removed([5, 2**64 - 1], None)


def test_an_adapter_without_its_name_cannot_be_translated() -> None:
    nameless, named = batch_of(
        STORED | {"lora_id": 3, "extra_keys": None}, STORED | {"lora_id": 3, "extra_keys": None, "lora_name": "adapter"}
    ).events

    assert isinstance(nameless, Stored)
    assert isinstance(named, Stored)
    assert (nameless.translatable, named.translatable) == (False, True)
    assert named.extras == [encode_extra_keys(["adapter"])] * 2


def test_blocks_with_images_have_the_hashes_that_a_router_gives_a_rendered_prompt() -> None:
    """The keys as vLLM 0.32 publishes them: adapter, images with the places of their first tokens, salt."""
    keys = [["sql", ["cat", 1], "salt"], ["sql", ["cat", -1], ["dog", 1]], ["sql"]]
    event = STORED | {
        "block_hashes": [1, 2, 3], "parent_block_hash": None, "token_ids": [5, 9, 9, 9, 6, 7], "lora_name": "sql",
        "lora_id": 1, "extra_keys": keys,
    }  # fmt: skip
    view = EngineView()
    view.apply(batch_of(event))

    extras = BlockExtras.of_media([Medium("cat", 1, 2), Medium("dog", 3, 1)], 2, "sql", "salt")
    assert view.take_change(0, 0.0)[0].stored == list(engine_chain([5, 9, 9, 9, 6, 7], 2, extras).hashes)


def test_events_that_are_not_known_are_passed_over() -> None:
    assert batch_of({"type": "BlockMoved"}, ["Other", 1]).events == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([1.0, [5]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved"}]]),
        msgpack.packb([1.0, [STORED | {"token_ids": [-1]}]]),
        msgpack.packb([1.0, [STORED | {"lookahead_token_ids": [1], "extra_keys": [[["a"]], None]}]]),
        msgpack.packb([float("nan"), []]),
        msgpack.packb([float("inf"), []]),
        msgpack.packb([1.0, [STORED]]) + b"\x00",
    ],
)
def test_what_is_no_batch_is_told(payload: bytes) -> None:
    with pytest.raises(UnreadableEventsError, match="batch 9 "):
        read_batch(9, payload)


def test_an_adapter_is_known_by_the_generation_of_its_weights_and_others_by_their_names() -> None:
    salted = [["sql", "salt"], ["sql"]]
    events = [
        {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1] * 8, "block_size": 4, "lora_name": name,
         "lora_id": 1, "extra_keys": [[name, *keys[1:]] for keys in salted]}
        for name in ("sql", "chat")
    ]  # fmt: skip
    batch = read_batch(1, msgpack.packb([1.0, [*events, {"type": "AllBlocksCleared"}]]))

    sql, chat, cleared = as_cached(batch, lambda name: "sql\n3" if name == "sql" else name).events

    assert isinstance(sql, Stored)
    assert isinstance(chat, Stored)
    expected = BlockExtras.of("sql\n3", "salt")
    assert list(sql.extras) == [expected.at[0], expected.usual]
    assert list(chat.extras) == [encode_extra_keys(["chat", "salt"]), encode_extra_keys(["chat"])]
    assert cleared == Cleared()
    assert as_cached(batch, str) is batch


ODD: list[Any] = [None, "x", b"x" * 32, -1, 2**63, 1.5, True, [], ["x"], [[1]], [None, [["a", "b"]]], {"a": 1}]


@pytest.mark.parametrize("kind", ["BlockStored", "BlockRemoved"])
def test_values_of_another_kind_leave_the_instance_estimated_with_a_reason(kind: str) -> None:
    """Whatever a field holds, what is raised is what a subscriber names as the reason."""
    sound: dict[str, Any] = STORED | {
        "type": kind,
        "parent_block_hash": None,
        "group_idx": 1,
        "kv_cache_spec_kind": "full_attention",
    }
    optional = {"lookahead_token_ids": [[1], [2]], "kv_cache_spec_sliding_window": 8, "locality": "LOCAL"}
    wrong = 0
    for name, odd in itertools.product([*sound, *optional], ODD):
        view = EngineView()
        try:
            view.apply(
                batch_of(sound | optional | {name: odd}, sound | {"group_idx": 0, "kv_cache_spec_kind": "mamba"})
            )
            view.take_change(1, 2.0)
        except (UnreadableEventsError, AmbiguousEventsError) as error:
            wrong += 1
            assert str(error)
    assert wrong > 10
