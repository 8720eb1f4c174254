"""The longest context, learned from an instance and remembered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from dualmap.router.pool.model_lengths import KEPT_S, RETRY_S, ModelLengths
from dualmap.router.pool.model_lists import InstanceQueries
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.view import ClusterView
from tests.router import tools


class Instance(httpx.AsyncBaseTransport):
    """Stands in for every instance of a pool."""

    def __init__(self) -> None:
        self.asked: list[httpx.Request] = []
        self.answer: Any = {"data": [{"id": "sql", "max_model_len": None}, {"id": "m", "max_model_len": 4096}]}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return httpx.Response(200, json=self.answer)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def lengths(clock: Any, instance: Instance) -> ModelLengths:
    return ModelLengths(clock, InstanceQueries(SecretStr("secret"), transport=instance))


def pool(*ready: str) -> Any:
    instances = {name: tools.spec(name) for name in ready}
    view = ClusterView.build(epoch=1, tree_version=1, instances=instances, tree=HotnessTree())
    return SimpleNamespace(settings=SimpleNamespace(name="p", model="m"), view=SimpleNamespace(view=view))


async def test_an_instance_is_asked_once_a_minute(lengths: ModelLengths, instance: Instance, clock: Any) -> None:
    served = pool("a")
    assert [await lengths.of(served), await lengths.of(served)] == [4096, 4096]
    assert [str(request.url) for request in instance.asked] == ["http://a.test:8000/v1/models"]
    assert instance.asked[0].headers["authorization"] == "Bearer secret"

    instance.answer = {"data": [{"id": "other", "max_model_len": 8192}]}
    clock.now_s += KEPT_S

    assert await lengths.of(served) == 8192


async def test_what_was_learned_stays_while_no_instance_answers(
    lengths: ModelLengths, instance: Instance, clock: Any
) -> None:
    await lengths.of(pool("a"))
    clock.now_s += KEPT_S
    assert await lengths.of(pool()) == 4096
    clock.now_s += RETRY_S
    instance.answer = httpx.ConnectError("refused")
    assert await lengths.of(pool("a")) == 4096


@pytest.mark.parametrize(
    "answer", [[], {}, {"data": 1}, {"data": [1, {"id": "m"}]}, {"data": [{"max_model_len": "x"}]}]
)
async def test_an_instance_that_does_not_say_it_is_asked_again_soon(
    lengths: ModelLengths, instance: Instance, clock: Any, answer: Any
) -> None:
    instance.answer = answer
    assert await lengths.of(pool("a")) is None
    instance.answer = {"data": [{"id": "m", "max_model_len": 64}]}
    assert await lengths.of(pool("a")) is None
    clock.now_s += RETRY_S
    assert await lengths.of(pool("a")) == 64
