"""The bounded memory of decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.errors import SloUnreachableError
from dualmap.router.requests.explain import (
    KEPT_CANDIDATES,
    Answer,
    Course,
    DecisionLog,
    DecodeLeg,
    Detours,
    Explanation,
    KeyedPrompt,
    Origin,
    PlacementRound,
    Terms,
)
from dualmap.scheduling.placing.decision import Decision, Reason
from dualmap.scheduling.placing.placement import Chosen, Observation, Placed, PlaceReply, PlaceStatus
from dualmap.scheduling.request.outcome import Usage
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.state.adapter_wait import AdapterWait
from dualmap.scheduling.state.hotness import HashKey
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.tier_load import InTier, Source, TierLoad
from dualmap.scheduling.tenants.shares import LEVELS, Standing
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.pool.codec import new_record
from dualmap.statestore.records import ReportedLoads
from tests.router import tools


@pytest.fixture
def scheduling() -> SchedulingSettings:
    classes = (PriorityClassSettings(name="interactive"), PriorityClassSettings(name="batch"))
    return SchedulingSettings(policy="dualmap-least-cost", queue_order="deadline", classes=classes)


def explanation(request_id: str, outcome: str | None = None) -> Explanation:
    origin, prompt = (
        Origin(request_id, "m", "default"),
        KeyedPrompt(10, 1, 16, 1, 2, "", HashKey(1, 2**64 - 1, 16, 3, 4)),
    )
    return Explanation(origin, Terms("dualmap"), prompt, Course(0.0, 5.0), Answer("a", outcome))


def test_what_is_kept_of_a_turn_says_that_it_was_parked() -> None:
    log = DecisionLog()
    turn = replace(explanation("x"), detours=Detours(run="0a1b", run_named_by="session_id", parked_s=2.5))

    log.add(turn)

    assert log.get("x") == turn
    assert {"run": "0a1b", "run_named_by": "session_id", "parked_s": 2.5}.items() <= turn.to_dict().items()


def test_the_oldest_is_forgotten_first() -> None:
    log = DecisionLog(limit=3)
    for number in range(5):
        log.add(explanation(str(number)))

    assert len(log) == 3
    assert log.get("1") is None
    assert [entry.origin.request_id for entry in log.recent(2)] == ["4", "3"]


def test_what_tiers_have_is_told_with_what_the_prices_decided() -> None:
    loads = {
        "a": InstanceLoad("a", InstanceState.READY, tiers=LOADS),
        "b": InstanceLoad("b", InstanceState.READY, tiers=TierLoad(0, 0.0, 0.0, 0, (InTier("disk", 9, 0),))),
        "c": InstanceLoad("c", InstanceState.READY, tiers=TierLoad(1, 0.1, 0.1, None, (InTier("host", 1, 0),))),
        "d": InstanceLoad("d", InstanceState.READY),
    }
    told = PlacementRound((*loads,), loads, Decision("a", 3, 100, 0.5, Reason.COST), 1, PlaceStatus.HELD).to_dict()

    assert told["tiers"] == [
        "a loads 2 blocks from host memory and 1 blocks from the shared store in 0.250 s, 0.200 s of it behind other"
        " loads, and computes 3 blocks of the shared store, as that costs less than to load them",
        "b computes 9 blocks of its disk, as that costs less than to load them",
        "c loads 1 blocks from host memory in 0.100 s",
    ]


def test_a_limit_of_none_remembers_nothing() -> None:
    log = DecisionLog(limit=0)
    log.add(explanation("x"))
    assert log.get("x") is None


def test_an_id_that_ends_again_is_the_newest_and_tells_its_last_story() -> None:
    log, again = DecisionLog(limit=2), explanation("a", "completed")
    for entry in (explanation("a"), explanation("b"), again, explanation("c")):
        log.add(entry)

    assert log.get("a") == again
    assert log.get("b") is None


def without_rounds(told: Explanation) -> Explanation:
    decode = told.detours.decode
    assert decode is not None
    return replace(told, rounds=(), detours=replace(told.detours, decode=replace(decode, rounds=())))


RECORD = new_record(InstanceSpec("a", "http://a", state=InstanceState.READY))


LOADS = TierLoad(3, 0.25, 0.05, 384, (InTier("host", 2, 0), InTier("pool", 4, 0)))


@pytest.mark.parametrize(
    "loads",
    [
        {
            "a": InstanceLoad("a", InstanceState.DRAINING, 7, hit_blocks=2, tiers=LOADS),
            "b": InstanceLoad("b", InstanceState.READY, adapter=AdapterWait(0.1, 0.5, 1.0)),
        },
        ReportedLoads([b"a", RECORD, 3, b"b", RECORD, 0], 1_000, {"a": LOADS}, {"b": [0.1, 0.5, 1.0]}),
    ],
)
def test_what_is_remembered_is_what_was_told(loads: Mapping[str, InstanceLoad]) -> None:
    decision = Decision("a", 3, 100, 0.5, Reason.CACHE, "b", 120)
    placed = Placed(
        PlaceReply(PlaceStatus.HELD, Observation(0, 0, loads, 1_000), Chosen("a", "b")), ("a", "b"), decision
    )
    told = replace(
        explanation("x"),
        origin=Origin("x", "m", "default", "client", "tenant", "key"),
        terms=Terms("dualmap", "batch", 1, Standing(3, 2.5, 1.25)),
        course=Course(10.0, 5.0, 0.5, 0.25, 0.75, 2.0, True),
        answer=Answer("a", "completed", 5, 1, Usage(10, 4, 3)),
        rounds=(PlacementRound.of(placed, 2),),
        detours=Detours(
            ("a: refused",),
            (0.25,),
            (("a", 3, 1.5),),
            ("too few",),
            True,
            0.5,
            DecodeLeg("b", 0.75, (PlacementRound.of(placed, 1),), 7),
        ),
    )
    log = DecisionLog()
    log.add(told)

    kept = log.get("x")

    assert kept is not None and kept.detours.decode is not None
    assert without_rounds(kept) == without_rounds(told)
    assert [each.to_dict() for each in kept.rounds] == [each.to_dict() for each in told.rounds]
    assert [type(each.decision.reason) for each in kept.detours.decode.rounds] == [Reason]
    assert (type(kept.to_dict()["leg"]), type(kept.rounds[0].status)) == (Leg, PlaceStatus)
    assert log.recent(5) == [kept]


def test_a_pull_is_explained_by_its_source_its_tokens_and_what_it_saves() -> None:
    pull = TierLoad(9, 0.4, 0.3, None, (InTier("host", 1, 0),), Source("a", "host-a", 5710, 8000, 0.25))
    loads = {"b": InstanceLoad("b", InstanceState.READY, prefill_tokens_per_s=8000.0, tiers=pull)}
    reply = PlaceReply(PlaceStatus.DISPATCHED, Observation(0, 0, loads), Chosen("b", None))
    placed = Placed(reply, ("b",), Decision("b", 9, 1, 0.4, Reason.COST, None, 0))

    (words,) = PlacementRound.of(placed, 1).to_dict()["tiers"]

    assert "loads 1 blocks from" in words
    assert words.endswith(
        "pulls 8,000 tokens from a in 0.400 s, 0.150 s of it behind what is booked on both links, and saves 1.000 s of "
        "computing"
    )


def test_a_round_over_the_whole_fleet_remembers_a_few_loads_with_the_chosen_one() -> None:
    names = tuple(f"i{number}" for number in range(100))
    loads = {name: InstanceLoad(name, InstanceState.READY) for name in names}
    decision = Decision("i77", 0, 1, 0.1, Reason.COST, alternative_id="i50")

    reply = PlaceReply(PlaceStatus.HELD, Observation(0, 0, loads), Chosen("i77", "i50"))

    kept = PlacementRound.of(Placed(reply, names, decision), attempt=1)

    assert kept.considered == 100
    assert kept.status is PlaceStatus.HELD
    assert len(kept.candidates) == len(kept.loads) == KEPT_CANDIDATES
    assert {"i77", "i50"} <= set(kept.loads)


def test_a_round_tells_of_the_instances_beyond_the_candidates_that_were_weighed() -> None:
    loads = {name: InstanceLoad(name, InstanceState.READY) for name in "abc"}
    reply = PlaceReply(PlaceStatus.DISPATCHED, Observation(0, 0, loads), Chosen("c", "a"))

    decision = Decision("c", 0, 1, 0.1, Reason.BEYOND_PAIR, alternative_id="a")

    kept = PlacementRound.of(Placed(reply, ("a", "b"), decision), attempt=1)

    assert kept.candidates == ("a", "b", "c")


async def test_a_request_tells_its_class_and_where_its_tenant_stood(start_runtime: Any, client_of: Any) -> None:
    slow = tools.spec("a", prefill_tokens_per_s=10.0, dispatch_window_tokens=1)
    runtime = await start_runtime(instances=(slow,), late_requests="refuse")
    light, heavy = (Caller(Tenant(name, priority_class="interactive"), "ci") for name in ("light", "heavy"))

    placings = []

    async def told(name: str, caller: Caller | None, **about: Any) -> dict[str, Any]:
        request = tools.request(f"{name} " * 40, request_id=name, **{"slo_s": 600.0, **about})
        request.caller = caller
        placings.append(asyncio.create_task(runtime.intake.place(request)))  # of held ones it waits
        await tools.settle()
        found: dict[str, Any] = (await client_of(runtime).get(f"/admin/explain/{name}")).json()
        return found

    first = await told("first", light)
    burst = [await told(f"burst-{number}", heavy) for number in range(4)]
    batch = await told("batch", heavy, asked_class="batch")
    late = await told("late", heavy, slo_s=1.0)
    nobody = await told("nobody", None)
    for placing in placings:
        placing.cancel()
    errors = [each for each in await asyncio.gather(*placings, return_exceptions=True) if isinstance(each, Exception)]

    assert (first["priority_class"], first["band"]) == ("interactive", 0)
    assert first["share"].startswith("tenant light had sent 0 times its share of the work (0.0 s of ")
    standing = burst[-1]["standing"]
    assert burst[-1]["band"] == standing["level"] > 0
    figures = f"({standing['sent_s']:.1f} s of {standing['share_s']:.1f} s)"
    assert burst[-1]["share"].startswith(f"held: tenant heavy had sent {standing['sent_s'] / standing['share_s']:.2g} ")
    assert figures in burst[-1]["share"]
    assert (batch["priority_class"], batch["band"]) == ("batch", LEVELS + batch["standing"]["level"])
    assert late["outcome"] == "refused"
    assert [type(error) for error in errors] == [SloUnreachableError]
    assert late["share"].startswith("refused: tenant heavy had sent ")
    assert (nobody["standing"], nobody["share"]) == (None, "")
