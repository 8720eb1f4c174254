"""Loads that were seen are read when somebody asks, and kept by instance."""

from __future__ import annotations

from scheduling.instance import InstanceLoad, InstanceState
from statestore.last_seen import LastSeenLoads, UnreadLoads


def load(instance_id: str, pending_tokens: int) -> InstanceLoad:
    return InstanceLoad(instance_id, InstanceState.READY, pending_tokens)


def test_a_load_is_read_once_and_only_if_asked_for() -> None:
    reads: list[str] = []

    def read(instance_id: str, figures: int) -> InstanceLoad:
        reads.append(instance_id)
        return load(instance_id, figures)

    loads = UnreadLoads({"a": 1, "b": 2}, read)

    assert ([*loads], len(loads), reads) == (["a", "b"], 2, [])
    assert (loads["b"].pending_tokens, loads["b"].pending_tokens, reads) == (2, 2, ["b"])
    assert loads == {"a": load("a", 1), "b": load("b", 2)}


def test_each_instances_latest_load_is_kept_until_it_leaves() -> None:
    seen = LastSeenLoads()
    seen.note({"a": load("a", 1), "b": load("b", 2)})
    seen.note(UnreadLoads({"b": 3, "c": 4}, load))

    assert seen.get("d") is None
    assert seen.all() == {"a": load("a", 1), "b": load("b", 3), "c": load("c", 4)}

    seen.forget_all_but({"a", "c"})
    assert set(seen.all()) == {"a", "c"}
