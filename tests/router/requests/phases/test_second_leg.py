"""Staged, pairing, paired, decoding: where a decode leg is placed again, and what it leaves in the store."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from dualmap.scheduling.estimates.learning import EndSample
from dualmap.scheduling.placing.placement import Search
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.settings import SchedulingSettings, SplitSettings
from dualmap.scheduling.state.instance import Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id
from dualmap.scheduling.state.request import RequestState
from tests.router import tools

ALWAYS = SchedulingSettings(split=SplitSettings(mode="always"))
CLOSED = InstanceFailure(FailureKind.CLOSED)


@pytest.fixture
async def split(start_runtime: Any) -> Any:
    """A split request whose prompt was prefilled, and its decode leg, placed."""
    roles = {"p": Role.PREFILL, "q": Role.PREFILL, "d": Role.DECODE, "e": Role.DECODE}
    runtime = await start_runtime(instances=tuple(replace(tools.spec(name), role=role) for name, role in roles.items()))
    request = tools.request("word " * 1000)
    request.may_split = True
    placed = await runtime.intake.place(request)
    assert placed.machine.to_send is Leg.PREFILL
    await placed.prefill_ended()
    assert placed.machine.to_send is Leg.DECODE
    return placed


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_decode_leg_whose_instance_failed_is_placed_on_another_at_once(split: Any, store: Any) -> None:
    placed = split
    failed_id = placed.machine.answering_id

    await placed.failed(Failed(CLOSED, keeps_kv=True))

    assert placed.machine.to_send is Leg.DECODE
    assert {failed_id, placed.machine.answering_id} == {"d", "e"}
    snapshot = await store.pool("default").snapshot()
    (known,) = [request for request in snapshot.requests if request.leg is Leg.DECODE]
    assert (known.instance_id, known.state) == (placed.machine.answering_id, RequestState.PREFILLED)
    assert snapshot.loads[failed_id].running_requests == 0
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_new_try_of_the_whole_request_reserves_its_decode_leg_again(split: Any, store: Any) -> None:
    placed, decode = split, split.machine.decode
    await placed.failed(Failed(CLOSED))
    assert placed.machine.to_send is Leg.PREFILL
    await placed.prefill_ended()
    again = placed.machine.decode
    await tools.settle()  # what was posted meanwhile releases nothing of the new leg

    records = await store.pool("default").records([placed.request_id, decode_leg_id(placed.request_id)])

    assert {record.leg: record.instance_id for record in records.values()} == {
        Leg.PREFILL: placed.machine.instance_id,
        Leg.DECODE: placed.machine.answering_id,
    }
    assert again is not decode
    placed.finish(Outcome.COMPLETED)
    await tools.settle()
    assert (await store.pool("default").snapshot()).requests == ()


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_an_engine_that_dies_in_a_decode_leg_is_that_of_its_decoder(split: Any) -> None:
    placed = split
    failed_id = placed.machine.answering_id

    await placed.failed(Failed(CLOSED))

    (suspect,) = placed.pool.evidence.quarantine.suspects.values()
    assert (list(suspect.died_at_s), suspect.deaths) == ([failed_id], 1)
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_the_first_token_of_a_decode_leg_tells_what_its_transfer_took(split: Any, store: Any) -> None:
    placed, decode = split, split.machine.decode
    decode.staged_s -= 0.25

    placed.first_token()
    await tools.settle()

    (told,) = [
        each.content
        for each in await store.pool("default").publications.samples("0", 10)
        if isinstance(each.content, EndSample)
    ]
    assert told.transfer_ms == pytest.approx(250, abs=200)
    assert told.transferred_tokens == placed.machine.spec.chain.prompt_tokens - decode.cached_tokens > 0
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_decode_leg_that_was_placed_again_teaches_no_transfer(split: Any, store: Any) -> None:
    placed = split
    await placed.failed(Failed(CLOSED, keeps_kv=True))

    placed.first_token()
    await tools.settle()

    assert not [
        each
        for each in await store.pool("default").publications.samples("0", 10)
        if isinstance(each.content, EndSample)
    ]
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
@pytest.mark.parametrize("streams", [True, False])
async def test_each_leg_is_released_once(
    split: Any, store: Any, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    placed, decode = split, split.machine.decode
    released, post = [], placed.pool.outbox.post

    def counted(release: Release, settled: Any = None) -> None:
        released.append(release.request_id)
        post(release, settled)

    monkeypatch.setattr(placed.pool.outbox, "post", counted)
    if streams:
        placed.first_token()
        await tools.settle()
    placed.finish(Outcome.COMPLETED)
    await tools.settle()

    assert sorted(released) == [placed.request_id, decode.request_id]
    assert (await store.pool("default").snapshot()).requests == ()
    assert not placed.context.live.get(placed.request_id)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_a_split_request_leaves_nothing_to_the_garbage_collector(split: Any) -> None:
    placed = split
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(placed.machine)
        placed.finish(Outcome.COMPLETED)
        await tools.settle()
        explanation = placed.context.decisions.get(placed.request_id)
        assert explanation.detours.decode.instance_id == placed.machine.answering_id
        del placed.machine
        assert gone() is None, "nothing that it has refers to it"
    finally:
        gc.enable()


@pytest.mark.parametrize("scheduling", [ALWAYS])
@pytest.mark.parametrize(("decoders", "answering"), [(("d",), "d"), ((), "m")])
async def test_a_decode_leg_leaves_the_instance_of_its_prefill_leg_where_there_is_another(
    start_runtime: Any, decoders: tuple[str, ...], answering: str
) -> None:
    roles = {"m": Role.MIXED, "p": Role.PREFILL} | dict.fromkeys(decoders, Role.DECODE)
    runtime = await start_runtime(instances=tuple(replace(tools.spec(name), role=role) for name, role in roles.items()))
    request = tools.request("word " * 40_000)
    request.may_split = True
    placed = await runtime.intake.place(request)
    if placed.machine.instance_id == "p":
        await placed.failed(Failed(CLOSED))
    assert (placed.machine.to_send, placed.machine.instance_id) == (Leg.PREFILL, "m")

    await placed.prefill_ended()

    assert (placed.machine.to_send, placed.machine.answering_id) == (Leg.DECODE, answering)
    placed.finish(Outcome.COMPLETED)


@pytest.mark.parametrize("scheduling", [ALWAYS])
async def test_what_is_kept_of_an_ended_request_has_no_search_of_its_decode_leg(split: Any) -> None:
    placed = split

    placed.finish(Outcome.COMPLETED)

    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, Search) and each.leg is Leg.DECODE]
    assert placed.machine.decode.rounds[0][0].decision.instance_id == placed.machine.answering_id
