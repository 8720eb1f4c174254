"""The decode leg of a split request: where it is placed again, and what it leaves in the store."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.estimates.learning import Finished
from dualmap.scheduling.placing.placement import Search
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.request import RequestState
from dualmap.statestore.answers import Release

ALWAYS = SchedulingSettings(split=SplitSettings(mode="always"))
CLOSED = InstanceFailure(FailureKind.CLOSED)


@pytest.fixture
async def split(start_runtime: Any, tools: Any) -> Any:
    """A split request whose prompt was prefilled, and its decode leg, placed."""
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    runtime = await start_runtime(instances=tuple(replace(tools.spec(name), role=role) for name, role in roles.items()))
    request = tools.request("word " * 1000)
    request.may_split = True
    placed = await runtime.lifecycle.place(request)
    assert placed.leg is Leg.PREFILL
    decode = placed.prefill_done()
    assert await decode.place() is None
    return placed, decode


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_decode_leg_whose_instance_failed_is_placed_on_another_at_once(split: Any, store: Any) -> None:
    placed, decode = split
    failed_id = decode.instance_id

    await decode.retry(CLOSED)
    failure = await decode.place()

    assert failure is None
    assert {failed_id, decode.instance_id} == {"d", "e"}
    snapshot = await store.pool("default").snapshot()
    (known,) = [request for request in snapshot.requests if request.leg is Leg.DECODE]
    assert (known.instance_id, known.state) == (decode.instance_id, RequestState.PREFILLED)
    assert snapshot.loads[failed_id].running_requests == 0
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_new_try_of_the_whole_request_reserves_its_decode_leg_again(split: Any, store: Any, tools: Any) -> None:
    placed, decode = split
    await placed.reroute(CLOSED)
    again = placed.prefill_done()
    assert await again.place() is None
    await tools.settle()  # what was posted meanwhile releases nothing of the new leg

    records = await store.pool("default").records([placed.request_id, decode_leg_id(placed.request_id)])

    assert {record.leg: record.instance_id for record in records.values()} == {
        Leg.PREFILL: placed.instance_id,
        Leg.DECODE: again.instance_id,
    }
    assert again is not decode
    placed.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await store.pool("default").snapshot()).requests == ()


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_an_engine_that_dies_in_a_decode_leg_is_that_of_its_decoder(split: Any) -> None:
    placed, decode = split
    failed_id = decode.instance_id

    await placed.reroute(CLOSED)

    (suspect,) = placed.pool.quarantine.suspects.values()
    assert (list(suspect.died_at_s), suspect.deaths) == ([failed_id], 1)
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_the_first_token_of_a_decode_leg_tells_what_its_transfer_took(split: Any, store: Any, tools: Any) -> None:
    placed, decode = split
    decode.staged_s -= 0.25

    placed.first_token()
    await tools.settle()

    (told,) = [
        each.lesson for each in await store.pool("default").samples("0", 10) if isinstance(each.lesson, Finished)
    ]
    assert told.transfer_ms == pytest.approx(250, abs=200)
    assert told.transferred_tokens == placed.chain.prompt_tokens - decode.cached_tokens > 0
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_decode_leg_that_was_placed_again_teaches_no_transfer(split: Any, store: Any, tools: Any) -> None:
    placed, decode = split
    await decode.retry(CLOSED)
    await decode.place()

    placed.first_token()
    await tools.settle()

    assert not [each for each in await store.pool("default").samples("0", 10) if isinstance(each.lesson, Finished)]
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
@pytest.mark.parametrize("streams", [True, False])
async def test_each_leg_is_released_once(
    split: Any, store: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    placed, decode = split
    released, over = [], placed.pool.fleet.over

    def counted(request_id: str, attempt: int, note: str = "", *, seen: bool = False) -> Release:
        released.append(request_id)
        return over(request_id, attempt, note, seen=seen)  # type: ignore[no-any-return]

    monkeypatch.setattr(placed.pool.fleet, "over", counted)
    if streams:
        placed.first_token()
        await tools.settle()
    placed.finish(Outcome.COMPLETED)
    await tools.settle()

    assert sorted(released) == [placed.request_id, decode.request_id]
    assert (await store.pool("default").snapshot()).requests == ()
    assert not placed._context.live.get(placed.request_id)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_split_request_leaves_nothing_to_the_garbage_collector(split: Any, tools: Any) -> None:
    placed, decode = split
    placed.finish(Outcome.COMPLETED)
    await tools.settle()

    assert placed.decode is None, "its leg has its owner"
    explanation = placed._context.decisions.get(placed.request_id)
    assert explanation.decode_instance_id == decode.last_instance_id


@pytest.mark.parametrize("scheduling", [ALWAYS])
@pytest.mark.parametrize(("decoders", "answering"), [(("d",), "d"), ((), "m")])
async def test_a_decode_leg_leaves_the_instance_of_its_prefill_leg_where_there_is_another(
    start_runtime: Any, tools: Any, decoders: tuple[str, ...], answering: str
) -> None:
    roles = {"m": Role.MIXED, "p": Role.PREFILL} | dict.fromkeys(decoders, Role.DECODE)
    runtime = await start_runtime(instances=tuple(replace(tools.spec(name), role=role) for name, role in roles.items()))
    request = tools.request("word " * 40_000)
    request.may_split = True
    placed = await runtime.lifecycle.place(request)
    if placed.instance_id == "p":
        await placed.reroute(CLOSED)
    assert (placed.leg, placed.instance_id) == (Leg.PREFILL, "m")

    decode = placed.prefill_done()

    assert await decode.place() is None
    assert decode.instance_id == answering
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_what_is_kept_of_an_ended_request_has_no_search_of_its_decode_leg(split: Any) -> None:
    placed, decode = split

    placed.finish(Outcome.COMPLETED)

    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Search) and each.leg is Leg.DECODE]
    assert decode.story()[2][0].decision.instance_id == decode.last_instance_id
