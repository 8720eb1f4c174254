"""Model names as servers list them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.model_names import MAX_NAMES, ModelList, adapter_changes, listed_models, merged_models


def test_names_of_the_model_and_adapters_with_their_model_are_told_apart() -> None:
    cards = [
        {"id": "qwen", "object": "model", "parent": None, "root": "/models/qwen"},
        {"id": "qwen-7b", "object": "model"},
        {"id": "sql", "parent": "qwen", "root": "/adapters/sql"},
    ]

    assert listed_models({"object": "list", "data": cards}) == {"qwen": "", "qwen-7b": "", "sql": "qwen"}


@pytest.mark.parametrize(
    "answer",
    [None, [], "x", {}, {"data": None}, {"data": []}, {"data": {"id": "m"}}, {"data": [3, {"id": 4}, {"id": ""}]}],
)
def test_an_answer_of_another_shape_lists_nothing_that_could_be_trusted(answer: Any) -> None:
    assert listed_models(answer) is None


def test_one_server_fills_the_store_with_a_bounded_number_of_names() -> None:
    assert len(listed_models({"data": [{"id": str(number)} for number in range(MAX_NAMES + 1)]}) or ()) == MAX_NAMES


@pytest.mark.parametrize(
    ("status", "known"),
    [(0, "stays"), (401, "stays"), (503, "stays"), (404, None), (405, None), (501, None), (200, None)],
)
def test_a_list_that_could_not_be_read_stays_and_one_that_is_not_there_is_forgotten(status: int, known: object) -> None:
    former = {"stays": ""}

    assert ModelList(None, status).after(former) == (former if known else None)


def test_a_list_that_was_read_takes_the_place_of_the_former_one() -> None:
    assert ModelList({"new": ""}, 200).after({"old": ""}) == {"new": ""}


def test_a_name_that_is_an_adapter_somewhere_is_one() -> None:
    lists = [{"qwen": "", "sql": ""}, None, {"qwen": "", "sql": "qwen"}, {"qwen": "", "sql": "qwen"}]

    assert merged_models(lists) == {"qwen": "", "sql": "qwen"}


def server(state: InstanceState = InstanceState.READY, **paths: str | None) -> InstanceSpec:
    """One that lists its model and these adapters; a path of None is not said."""
    known = {name: path for name, path in paths.items() if path is not None}
    models = {"qwen": ""} | dict.fromkeys(paths, "qwen")
    return InstanceSpec("a", "http://a", state=state, models=models, adapters=known)


@pytest.mark.parametrize(
    ("former", "now", "loaded", "gone"),
    [
        (server(sql="/1"), server(chat="/3", sql="/1"), ["chat"], []),
        (server(sql="/1"), server(sql="/2"), ["sql"], []),
        (server(sql=None), server(sql="/2"), [], []),
        (server(sql="/1", chat="/3"), server(chat="/3"), [], ["sql"]),
        (server(sql="/1"), replace(server(), models=None), [], []),
        (None, server(chat="/3", sql="/1"), ["chat", "sql"], []),
        (replace(server(), models=None), server(sql="/1"), [], []),
        (replace(server(InstanceState.STARTING), models=None), server(sql="/1"), ["sql"], []),
    ],
)
def test_what_a_server_lists_says_what_it_has_loaded_and_what_it_knows_no_more(
    former: InstanceSpec | None, now: InstanceSpec, loaded: list[str], gone: list[str]
) -> None:
    assert adapter_changes(former, now) == (loaded, gone)
