"""What a replica counts of revisions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from dualmap.router.pool.revision_counts import MOST_OF_SESSION
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.request.machine import Failed
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.revisions.figures import Figures, figures_from
from dualmap.scheduling.revisions.weights import RevisionWeights, with_weights, without
from tests.router.tools import request, spec
from tests.support.manual_clock import ManualClock

FLEET = (spec("a", revision="v2"), spec("b", revision="v2"))


@pytest.fixture
async def runtime(start_runtime: Any) -> Runtime:
    started: Runtime = await start_runtime(instances=FLEET)
    await weigh(started, v1=0.0, v2=100.0)
    return started


async def weigh(runtime: Runtime, **percents: float) -> RevisionWeights:
    pool = runtime.pools.pools["default"]
    made = await pool.store.revisions.change(lambda known: with_weights(known, percents), "changed", by="ada")
    await pool.view.refresh()
    return made


def counted(runtime: Runtime) -> Figures:
    pool = runtime.pools.pools["default"]
    return figures_from(pool.revision_counts.text, pool.view.revisions.version).get("v2", Figures())


async def test_an_answer_counts_with_its_times(runtime: Runtime, clock: ManualClock) -> None:
    live = await runtime.intake.place(request())
    live.sent()
    clock.jump(0.5)
    live.first_token()
    clock.jump(0.9)
    live.finish(Outcome.COMPLETED, Usage(100, 60, 10))

    found = counted(runtime)

    assert (found.requests, found.failed, found.judged, found.late) == (1, 0, 1, 0)
    assert (found.streamed, found.slow) == (1, 1), "0.1 s per token"
    assert (found.ttft.count, found.tpot.count) == (1, 1)
    assert (found.prompt_tokens, found.hit_tokens) == (100, 60)


async def test_a_failure_counts_though_another_instance_answers(runtime: Runtime) -> None:
    live = await runtime.intake.place(request())
    live.sent()
    await live.failed(Failed(InstanceFailure(FailureKind.STATUS, "it answered 500", 500)))
    live.sent()
    live.finish(Outcome.COMPLETED)

    assert (counted(runtime).requests, counted(runtime).failed) == (1, 1)


async def test_sessions_that_began_before_the_last_change_do_not_count(runtime: Runtime) -> None:
    old = request("the first session " * 9)
    (await runtime.intake.place(old)).finish(Outcome.COMPLETED)
    assert counted(runtime).requests == 1

    await weigh(runtime, v1=1.0, v2=99.0)
    (await runtime.intake.place(request("the first session " * 9))).finish(Outcome.COMPLETED)
    assert counted(runtime) == Figures()
    (await runtime.intake.place(request("a new session " * 9))).finish(Outcome.COMPLETED)
    assert counted(runtime).requests == 1


async def test_weights_that_were_forgotten_and_set_again_count_from_their_first_version_on(runtime: Runtime) -> None:
    await weigh(runtime, v1=1.0, v2=99.0)
    (await runtime.intake.place(request())).finish(Outcome.COMPLETED)
    assert counted(runtime).requests == 1
    pool = runtime.pools.pools["default"]
    for revision in ("v1", "v2"):
        await pool.store.revisions.change(partial(without, revision=revision), "forgotten", by="ada")

    assert (await weigh(runtime, v1=0.0, v2=100.0)).version == 1
    (await runtime.intake.place(request("a new session " * 9))).finish(Outcome.COMPLETED)

    assert counted(runtime).requests == 1


async def test_what_a_client_chose_says_nothing(runtime: Runtime) -> None:
    (await runtime.intake.place(request(asked_revision="v2"))).finish(Outcome.COMPLETED)

    assert counted(runtime) == Figures()


async def test_one_session_makes_no_revision_look_ill(runtime: Runtime, clock: ManualClock) -> None:
    for _ in range(5):
        (await runtime.intake.place(request())).finish(Outcome.CLIENT_ERROR)
    assert (counted(runtime).requests, counted(runtime).failed) == (1, 1)

    for _ in range(5):
        live = await runtime.intake.place(request("another session " * 9, slo_s=0.001))
        live.sent()
        clock.jump(0.5)
        live.first_token()
        live.finish(Outcome.COMPLETED)
    assert (counted(runtime).requests, counted(runtime).late) == (2, 1)

    for _ in range(MOST_OF_SESSION + 5):
        (await runtime.intake.place(request("a long session " * 9))).finish(Outcome.COMPLETED)
    assert counted(runtime).requests == 2 + MOST_OF_SESSION
    (await runtime.intake.place(request("a new session " * 9))).finish(Outcome.CLIENT_ERROR)
    assert (counted(runtime).requests, counted(runtime).failed) == (3 + MOST_OF_SESSION, 2)
