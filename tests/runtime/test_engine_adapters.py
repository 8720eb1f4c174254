"""What comes of the calls by which engines load and unload adapters."""

from __future__ import annotations

import pytest

from dualmap.runtime.engine_adapters import NOT_LISTED, NOT_OFFERED, EngineAdapters
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, Step
from tests.support.adapter_servers import AdapterServers

URL = "http://a.test:8000"
SQL = RegisteredAdapter("/adapters/sql", generation=1)


@pytest.fixture
def servers() -> AdapterServers:
    made = AdapterServers()
    made.add("a")
    return made


@pytest.fixture
def engines(servers: AdapterServers) -> EngineAdapters:
    return EngineAdapters("secret", transport=servers)


async def test_an_adapter_is_loaded_by_the_spelling_of_its_generation_and_listed(
    servers: AdapterServers, engines: EngineAdapters
) -> None:
    made = await engines.make(URL, "sql", SQL, Step.LOAD)

    assert made.complaint == ""
    assert made.listed.paths == {"sql": "/adapters/sql/."}
    assert servers.of["a"].calls == [("load", "sql", "/adapters/sql/.")]


@pytest.mark.parametrize(
    ("there", "calls"),
    [("/adapters/sql/.", ["load"]), ("/adapters/sql", ["load", "replace"])],
    ids=["the same weights", "former weights"],
)
async def test_an_adapter_that_somebody_else_loaded_is_replaced_if_it_is_another_one(
    servers: AdapterServers, engines: EngineAdapters, there: str, calls: list[str]
) -> None:
    servers.of["a"].adapters["sql"] = there

    made = await engines.make(URL, "sql", SQL, Step.LOAD)

    assert made.complaint == ""
    assert [call for call, *_ in servers.of["a"].calls] == calls
    assert servers.of["a"].adapters == {"sql": "/adapters/sql/."}


async def test_a_server_that_loads_nothing_at_run_time_is_told_how_to_be_started(
    servers: AdapterServers, engines: EngineAdapters
) -> None:
    servers.of["a"].at_run_time = False

    assert (await engines.make(URL, "sql", SQL, Step.LOAD)).complaint == NOT_OFFERED


async def test_a_server_with_several_api_processes_is_found_out(
    servers: AdapterServers, engines: EngineAdapters
) -> None:
    servers.of["a"].hides = True

    assert (await engines.make(URL, "sql", SQL, Step.LOAD)).complaint == NOT_LISTED


async def test_an_engines_own_words_are_passed_on_and_a_server_that_is_away_is_no_exception(
    servers: AdapterServers, engines: EngineAdapters
) -> None:
    servers.of["a"].missing = frozenset({"/adapters/sql/."})
    refused = await engines.make(URL, "sql", SQL, Step.LOAD)
    servers.of["a"].away = True
    away = await engines.make(URL, "sql", SQL, Step.LOAD)

    assert refused.complaint == "it answered 404: Loading lora sql failed: No adapter found for /adapters/sql/."
    assert (refused.status, away.status) == (404, 0)
    assert "cannot be reached" in away.complaint


async def test_an_adapter_that_is_gone_already_counts_as_unloaded(
    servers: AdapterServers, engines: EngineAdapters
) -> None:
    servers.of["a"].adapters["sql"] = "/adapters/sql/."
    first, second = [await engines.make(URL, "sql", SQL, Step.UNLOAD) for _ in range(2)]

    assert (first.complaint, second.complaint) == ("", "")
    assert servers.of["a"].adapters == {}
