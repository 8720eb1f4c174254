"""Model names, aliases and LoRA adapters lead to pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dualmap.router.errors import InvalidRequestError, UnknownModelError
from dualmap.router.pool.pool_directory import DuplicateModelError, PoolDirectory, Route
from dualmap.router.pool.view import GivenNames
from dualmap.runtime.pool_settings import PoolSettings


@dataclass(frozen=True)
class Pool:
    settings: PoolSettings


SMALL = Pool(PoolSettings(name="small", model="qwen-7b", aliases=("gpt-4o-mini",), loras=("sql",)))
LARGE = Pool(PoolSettings(name="large", model="qwen-72b"))


def test_models_aliases_and_adapters_lead_to_their_pool() -> None:
    directory = PoolDirectory([SMALL, LARGE])

    routes = {name: directory.resolve(name) for name in ("qwen-7b", "gpt-4o-mini", "sql", "qwen-72b")}

    assert {name: route.pool.settings.name for name, route in routes.items()} == {
        "qwen-7b": "small",
        "gpt-4o-mini": "small",
        "sql": "small",
        "qwen-72b": "large",
    }
    assert {name: (route.model, route.lora) for name, route in routes.items()} == {
        "qwen-7b": ("qwen-7b", None),
        "gpt-4o-mini": ("qwen-7b", None),
        "sql": ("sql", "sql"),
        "qwen-72b": ("qwen-72b", None),
    }


def test_no_model_means_the_only_pool() -> None:
    assert PoolDirectory([LARGE]).resolve("").model == "qwen-72b"
    with pytest.raises(InvalidRequestError):
        PoolDirectory([SMALL, LARGE]).resolve("")


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(UnknownModelError):
        PoolDirectory([LARGE]).resolve("qwen")


def test_a_name_claimed_twice_stops_the_start_and_is_named() -> None:
    with pytest.raises(DuplicateModelError, match=r"'qwen-72b'.*'large'.*'other'"):
        PoolDirectory([LARGE, Pool(PoolSettings(name="other", model="qwen-72b"))])


def test_a_name_that_a_pool_gives_itself_twice_means_the_same() -> None:
    pool = Pool(PoolSettings(model="qwen", aliases=("qwen", "q", "q"), loras=("sql", "sql")))

    assert set(PoolDirectory([pool]).routes) == {"qwen", "q", "sql", ""}


def test_models_are_listed_in_openais_shape() -> None:
    listed = PoolDirectory([SMALL, LARGE]).model_cards(created_s=7, lengths={"small": 32_768})

    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["qwen-7b", "gpt-4o-mini", "sql", "qwen-72b"]
    assert all(card["object"] == "model" and card["created"] == 7 for card in listed["data"])
    assert {card["id"]: card["parent"] for card in listed["data"] if card["parent"]} == {"sql": "qwen-7b"}
    assert [card.get("max_model_len") for card in listed["data"]] == [32_768, 32_768, 32_768, None]


def test_the_only_pool_is_listed_by_its_names_alone() -> None:
    listed = PoolDirectory([SMALL]).model_cards(created_s=7, lengths={})

    assert [card["id"] for card in listed["data"]] == ["qwen-7b", "gpt-4o-mini", "sql"]


# learned names ---------------------------------------------------------------------------------------------------
def test_names_that_instances_list_lead_to_their_pool_as_long_as_they_are_listed() -> None:
    directory = PoolDirectory([SMALL, LARGE])
    directory.learn("large", GivenNames(), {"qwen-72b": "", "qwen2.5-72b": "", "law": "qwen-72b"})

    assert directory.resolve("qwen2.5-72b") == Route(LARGE, "qwen2.5-72b")
    assert directory.resolve("law") == Route(LARGE, "law", "law")
    cards = {card["id"]: card for card in directory.model_cards(created_s=7, lengths={})["data"]}
    assert cards["law"]["parent"] == "qwen-72b" and cards["qwen2.5-72b"]["parent"] is None

    directory.learn("large", GivenNames(), {"qwen-72b": ""})
    with pytest.raises(UnknownModelError):
        directory.resolve("law")


def test_a_configured_name_keeps_its_meaning_whatever_instances_list() -> None:
    directory = PoolDirectory([SMALL, LARGE])
    directory.learn("large", GivenNames(), {"gpt-4o-mini": "", "sql": ""})
    directory.learn("small", GivenNames({"qwen-72b": "lora"}), {})

    assert directory.resolve("gpt-4o-mini") == Route(SMALL, "qwen-7b")
    assert directory.resolve("sql") == Route(SMALL, "sql", "sql")
    assert directory.resolve("qwen-72b") == Route(LARGE, "qwen-72b")
    assert directory.contested == {}


def test_added_names_come_before_listed_ones_and_go_when_they_are_removed() -> None:
    directory = PoolDirectory([SMALL, LARGE])
    directory.learn("small", GivenNames(), {"law": ""})
    directory.learn("large", GivenNames({"law": "lora", "big": ""}), {})

    assert directory.resolve("law").pool is LARGE
    assert directory.resolve("big") == Route(LARGE, "qwen-72b")
    directory.learn("large", GivenNames(), {})
    assert directory.resolve("law").pool is SMALL


def test_a_name_that_two_pools_list_is_served_by_the_first_which_the_log_says_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = PoolDirectory([SMALL, LARGE])
    directory.learn("large", GivenNames(), {"chat": ""})
    assert directory.resolve("chat").pool is LARGE
    for more in ({}, {"another": ""}):
        directory.learn("small", GivenNames(), {"chat": "", **more})

    assert directory.resolve("chat").pool is SMALL
    assert directory.contested == {"chat": ("small", "large")}
    assert caplog.text.count("'chat' is listed by instances of the pools small, large") == 1
