"""A prompt that kills every engine it meets."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from dualmap.simulation.emulator.generation_request import DEADLY_TEXT
from tests.fleet.fleet_process import Fleet, running_fleet, until

DEADLY = DEADLY_TEXT.decode()
OPTIONS = ("--replicas", "1", "--workers", "1", "--instances", "5", "--worker.health_interval_s", "0.3")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("deadly"), OPTIONS) as fleet:
        yield fleet


def test_a_prompt_that_kills_its_engine_takes_two_of_them_and_is_refused_then(fleet: Fleet, client: OpenAI) -> None:
    def states() -> list[str]:
        return sorted(each["state"] for each in fleet.instances().values())

    stubborn = client.with_options(max_retries=2)
    for deadly, dead in ((DEADLY, 2), (f"streamed, {DEADLY}", 4)):
        with pytest.raises(openai.UnprocessableEntityError, match="2 engines died while they held this prompt"):
            stubborn.completions.create(model=fleet.model, prompt=deadly, max_tokens=4, stream=dead == 4)

        until(lambda: states() == ["down"] * dead + ["ready"] * (5 - dead), f"{dead} engines are dead")  # noqa: B023
        assert fleet.placement("an innocent prompt")
    fleet.until_idle()
