"""What a registration is, how its path is spelled, and which calls instances lack for it."""

from __future__ import annotations

import posixpath
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.registered_adapters import (
    AdapterState,
    DueStep,
    RegisteredAdapter,
    Step,
    cache_name,
    due_steps,
    homes_of,
    lies_in,
    model_of,
    normal_path,
    spelled,
    step_for,
)
from dualmap.scheduling.state.view import ClusterView

SQL = RegisteredAdapter("/adapters/sql")
GONE = replace(SQL, state=AdapterState.UNLOADED)


def having(instance_id: str = "a", **adapters: str) -> InstanceSpec:
    models = {"base": "", **dict.fromkeys(adapters, "base")}
    return InstanceSpec(
        instance_id, f"http://{instance_id}", state=InstanceState.READY, models=models, adapters=adapters or None
    )


@given(st.sets(st.integers(0, 5000), min_size=2, max_size=50))
def test_generations_have_spellings_of_their_own_of_the_same_folder(generations: set[int]) -> None:
    texts = [spelled("/adapters/sql", generation) for generation in generations]

    assert len(set(texts)) == len(texts)
    assert {posixpath.normpath(text) for text in texts} == {"/adapters/sql"}


def test_a_repository_has_one_spelling_and_is_known_to_have_no_other() -> None:
    adapter = RegisteredAdapter("team/sql-lora", generation=3)

    assert adapter.engine_path == "team/sql-lora"
    assert not adapter.has_own_spelling
    assert RegisteredAdapter("/adapters/sql", generation=3).has_own_spelling


@pytest.mark.parametrize(
    ("sent", "plain"),
    [("/a/b", "/a/b"), ("/a//b/.", "/a/b"), ("/a/./b/", "/a/b"), ("//a/b", "/a/b"), ("team/sql", "team/sql")],
)
def test_a_path_is_spelled_plainly(sent: str, plain: str) -> None:
    assert normal_path(sent) == plain


@pytest.mark.parametrize("sent", ["", "/a/../b", "..", "a/..", " /a", "/a\n", "/a\\b", "/" + "a" * 1001])
def test_a_path_that_climbs_or_is_none_is_refused(sent: str) -> None:
    with pytest.raises(ValueError, match="must"):
        normal_path(sent)


def test_a_folder_contains_what_is_below_it_alone() -> None:
    assert lies_in("/adapters/acme/sql", ["/adapters/acme"])
    assert lies_in("/adapters/acme/sql", ["/other", "/adapters/acme/"])
    assert not lies_in("/adapters/acme", ["/adapters/acme"])
    assert not lies_in("/adapters/acme-2/sql", ["/adapters/acme"])
    assert not lies_in("adapters/acme/sql", ["/adapters/acme"])


def test_kv_of_a_later_generation_has_another_name_and_instances_know_the_same_one() -> None:
    later = replace(SQL, generation=2)

    assert [cache_name("sql", each) for each in (None, SQL, later)] == ["sql", "sql", "sql\n2"]
    assert model_of(cache_name("sql", later)) == "sql"


def test_a_record_is_read_as_it_was_written_and_fields_of_newer_versions_are_dropped() -> None:
    adapter = RegisteredAdapter("/a", base="m", rank=8, tenant="acme", generation=4, since_ms=7, is_3d=True)

    assert RegisteredAdapter.parse(adapter.text()) == adapter
    assert RegisteredAdapter.parse(b'{"path":"/a","newer":1}') == RegisteredAdapter("/a")


@pytest.mark.parametrize(
    "text",
    [b"{}", b"[]", b"x", b'{"path":""}', b'{"path":"/a","rank":-1}', b'{"path":1}', b'{"path":"/a","state":"x"}'],
)
def test_what_is_no_record_is_refused(text: bytes) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        RegisteredAdapter.parse(text)


@pytest.mark.parametrize(
    ("spec", "adapter", "step"),
    [
        (having(), SQL, Step.LOAD),
        (having(sql="/adapters/sql"), SQL, None),
        (having(sql="/adapters/sql"), replace(SQL, generation=1), Step.REPLACE),
        (having(sql="/elsewhere"), SQL, Step.REPLACE),
        (replace(having(sql="/x"), adapters=None), SQL, None),
        (replace(having(), models=None), SQL, None),
        (having(), GONE, None),
        (having(sql="/adapters/sql/./."), GONE, Step.UNLOAD),
        (having(sql="/elsewhere"), GONE, None),
    ],
)
def test_the_call_that_an_instance_lacks(spec: InstanceSpec, adapter: RegisteredAdapter, step: Step | None) -> None:
    assert step_for(spec, "sql", adapter) is step


def test_homes_are_loaded_by_use_as_far_as_there_is_room_and_what_is_wrong_anywhere_comes_first() -> None:
    home = replace(having(), adapter_slots=1, adapter_host_slots=2)
    adapters = {name: RegisteredAdapter(f"/adapters/{name}") for name in ("one", "two", "three", "sql")}
    homes = dict.fromkeys(("one", "two", "three"), ("a",))
    other, down = having("b", sql="/old"), replace(having("c", sql="/old"), state=InstanceState.DOWN)

    due = [*due_steps({"a": home, "b": other, "c": down}, adapters, homes, {"three": 0, "one": 1})]

    assert due == [DueStep("a", "three", Step.LOAD), DueStep("a", "one", Step.LOAD), DueStep("b", "sql", Step.REPLACE)]


def test_an_adapter_has_two_homes_which_stay_when_its_weights_change() -> None:
    specs = {name: having(name) for name in "abcdefgh"}
    view = ClusterView.build(epoch=1, tree_version=1, instances=specs, tree=HotnessTree())

    homes = {name: homes_of(view, "base", name) for name in ("sql", "chat", "law")}

    assert all(len(each) == 2 for each in homes.values())
    assert len(set(homes.values())) > 1
    assert homes_of(view, "base", "sql") == homes["sql"]
