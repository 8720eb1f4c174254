"""A request that is over leaves nothing to the garbage collector: its objects go as soon as they are not needed."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import Role
from tests.router import tools
from tests.router.http.kit import CHAT
from tests.support.served_instance import ServedInstance, served_instance, staging


@pytest.fixture
def scheduling() -> SchedulingSettings:
    return SchedulingSettings(policy="dualmap", block_tokens=16, split=SplitSettings(mode="always"))


@pytest.fixture
def legs() -> Iterator[tuple[ServedInstance, ServedInstance]]:
    with served_instance("m", answer=staging) as prefill, served_instance("m") as decode:
        yield prefill, decode


def unreachable() -> Counter[str]:
    """The objects of the project by type that only the collector can free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("dualmap."))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("split", [False, True], ids=["one_leg", "two_legs"])
async def test_an_answered_request_is_in_no_cycle_of_references(
    start_runtime: Any, start_router: Any, legs: tuple[ServedInstance, ServedInstance], *, stream: bool, split: bool
) -> None:
    prefill, decode = legs
    members = [tools.spec("d", url=decode.url, role=Role.DECODE if split else Role.MIXED)]
    if split:
        members.append(tools.spec("p", url=prefill.url, role=Role.PREFILL))
    runtime = await start_runtime(instances=tuple(members), pools=(PoolSettings(model="m"),))
    router = await start_router(runtime.intake)
    client = await router.connect()
    message = {"role": "user", "content": "some words of a prompt " * 100}
    asked = {"model": "m", "messages": [message], "max_tokens": 5, "stream": stream}

    async def ask() -> None:
        client.request(CHAT, asked, headers="content-type: application/json\r\n")
        assert (await client.answer()).status == 200
        await tools.settle()

    # What other tests left is taken out of the collector's sight: else the next collection may take longer than
    # connections stay open, and those that were closed meanwhile are found.
    gc.collect()
    gc.freeze()
    await ask()  # which opens connections
    gc.collect()
    gc.disable()
    try:
        await ask()
        assert bool(prefill.reads) is split
        assert unreachable() == {}
    finally:
        gc.enable()
