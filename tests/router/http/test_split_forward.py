"""The legs of a split request as servers read them that are no parts of the fleet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import Role
from tests.router import tools
from tests.router.http.kit import CHAT
from tests.support.served_instance import STAGED, ServedInstance, served_instance, staging


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap", block_tokens=16, split=SplitSettings(mode="always"))


@pytest.fixture
def legs() -> Iterator[tuple[ServedInstance, ServedInstance]]:
    with served_instance("m", answer=staging) as prefill, served_instance("m") as decode:
        yield prefill, decode


@pytest.mark.parametrize("given", ["null", "{}", '{"remote_host":"10.6.6.6"}', 'null,"kv_transfer_params":{"a":1}'])
async def test_what_a_client_says_of_its_kv_costs_a_split_request_no_transfer(
    start_runtime: Any, start_router: Any, legs: tuple[ServedInstance, ServedInstance], given: str
) -> None:
    prefill, decode = legs
    members = (
        tools.spec("p", url=prefill.url, role=Role.PREFILL),
        tools.spec("d", url=decode.url, role=Role.DECODE),
    )
    pool = PoolSettings(model="m", aliases=("alias",))
    runtime = await start_runtime(instances=members, pools=(pool,))
    router = await start_router(runtime.intake)
    client = await router.connect()
    body = b'{"model":"alias","messages":[{"role":"user","content":"%b"}],"max_tokens":5,"kv_transfer_params":%b}'

    sent = body % (b"some words of a prompt " * 100, given.encode())
    client.request(CHAT, sent, headers="content-type: application/json\r\n")

    assert (await client.answer()).status == 200
    asked = prefill.last.fields
    assert asked["kv_transfer_params"]["do_remote_decode"] is True and asked["max_tokens"] == 1
    assert decode.last.fields["kv_transfer_params"] == STAGED and decode.last.fields["max_tokens"] == 5
    assert asked["model"] == decode.last.fields["model"] == "m"
