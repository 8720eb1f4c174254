"""Which revision of its pool serves a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dualmap.router.prompts.inference_request import CHAT_PATH
from dualmap.router.prompts.run_identity import SentRun
from dualmap.router.replica.runtime import Runtime
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.revisions.weights import RevisionWeights, with_shadow, with_tenant, with_weights
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.errors import StoreUnavailableError
from dualmap.statestore.memory import MemoryStore
from tests.router.tools import Tampered, request, spec

FLEET = (
    spec("a", revision="v1"), spec("b", revision="v1"), spec("c", revision="v2"), spec("d", revision="v2"),
    spec("e", revision="v3"),
)  # fmt: skip
OF = {each.instance_id: each.revision for each in FLEET}
SESSIONS = range(60)


async def weigh(runtime: Runtime, changed: Callable[[RevisionWeights], RevisionWeights]) -> None:
    pool = runtime.pools.pools["default"]
    await pool.store.revisions.change(changed, "changed", by="ada")
    await pool.view.refresh()


def percents(*, move: bool = False, **given: float) -> Callable[[RevisionWeights], RevisionWeights]:
    return lambda known: with_weights(known, given, move=move)


def turn(session: int, turns: int) -> dict[str, Any]:
    begun = [{"role": "user", "content": f"question {session} " + "word " * 40}]
    rest = [{"role": role, "content": f"more {n}"} for n in range(turns - 1) for role in ("assistant", "user")]
    return {"messages": begun + rest}


async def served(runtime: Runtime, session: int, turns: int = 1, **about: Any) -> str:
    """The revision that serves a turn of a conversation."""
    live = await runtime.intake.place(request(path=CHAT_PATH, body=turn(session, turns), **about))
    live.finish(Outcome.COMPLETED)
    return OF[live.machine.instance_id]


async def all_served(runtime: Runtime, turns: int = 1) -> dict[int, str]:
    return {session: await served(runtime, session, turns) for session in SESSIONS}


async def test_a_growing_weight_takes_new_sessions_and_leaves_running_ones(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=95.0, v2=5.0))

    before = await all_served(runtime)
    await weigh(runtime, percents(v2=50.0))
    after = await all_served(runtime, turns=2)
    new = [await served(runtime, 1000 + session) for session in SESSIONS]

    assert after == before
    assert list(before.values()).count("v2") < 10
    assert 15 < new.count("v2") < 45
    assert "v3" not in {*new, *before.values()}, "what has no weight is sent nothing"


@pytest.mark.parametrize("new_percent", [5.0, 0.0])
async def test_sessions_that_began_before_the_first_weights_stay_where_their_cache_is(
    start_runtime: Any, new_percent: float
) -> None:
    runtime = await start_runtime(instances=FLEET[:4])
    before = await all_served(runtime)
    await weigh(runtime, percents(v1=100.0 - new_percent, v2=new_percent))

    after = await all_served(runtime, turns=2)
    await weigh(runtime, percents(v1=10.0, v2=90.0))

    assert list(before.values()).count("v2") > 15
    assert after == before
    assert await all_served(runtime, turns=3) == before


async def test_sessions_that_no_cache_has_are_not_sent_to_a_revision_of_little_weight(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=70.0, v2=30.0))

    assert {*(await all_served(runtime, turns=2)).values()} == {"v1"}


async def test_sessions_under_way_that_are_new_to_the_fleet_follow_later_weights(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=70.0, v2=30.0))
    await weigh(runtime, percents(v1=50.0, v2=50.0))

    assert 15 < list((await all_served(runtime, turns=2)).values()).count("v2") < 45


async def test_figures_count_no_session_that_began_before_the_first_weights(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await all_served(runtime)
    await weigh(runtime, percents(v1=50.0, v2=50.0))
    counts = runtime.pools.pools["default"].revision_counts

    await all_served(runtime, turns=2)
    assert counts.text == ""
    await served(runtime, 1000)
    assert counts.text.startswith("1 ")


async def test_a_shadow_gets_copies_of_sessions_alone_that_began_since_it_did(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=100.0))
    await served(runtime, 1)
    await weigh(runtime, lambda known: with_shadow(known, "v2", 100.0))

    assert [await is_copied(runtime, session, turns) for session, turns in ((1, 2), (2, 1), (2, 2))] == [
        False,
        True,
        True,
    ]


async def is_copied(runtime: Runtime, session: int, turns: int) -> bool:
    live = await runtime.intake.place(request(path=CHAT_PATH, body=turn(session, turns)))
    live.finish(Outcome.COMPLETED)
    return bool(live.machine.spec.shadowed)


async def test_all_replicas_keep_a_session_at_its_home(start_runtime: Any) -> None:
    one, two = await start_runtime(instances=FLEET), await start_runtime()
    await weigh(one, percents(v1=95.0, v2=5.0))
    await two.pools.pools["default"].view.refresh()

    before = await all_served(one)
    await weigh(two, percents(v2=100.0))

    assert await all_served(two, turns=3) == before


async def test_a_rollback_moves_the_sessions_of_the_revision_at_once(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=50.0, v2=50.0))
    before = await all_served(runtime)

    await weigh(runtime, percents(v2=0.0, move=True))

    assert "v2" in before.values()
    assert {*(await all_served(runtime, turns=2)).values()} == {"v1"}


async def test_sessions_of_a_revision_that_is_gone_go_elsewhere(start_runtime: Any, store: MemoryStore) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=50.0, v2=50.0))
    await all_served(runtime)

    for name in ("c", "d"):
        await store.pool("default").members.set_instance_state(name, InstanceState.DOWN)
    await runtime.pools.pools["default"].view.refresh()

    assert {*(await all_served(runtime, turns=2)).values()} == {"v1"}


async def test_a_run_stays_whatever_its_prompts_are(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=50.0, v2=50.0))
    run = SentRun("5fe1")

    revisions = {await served(runtime, session, run=run) for session in SESSIONS}

    assert len(revisions) == 1


async def test_a_tenant_and_a_header_choose_a_revision(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, lambda known: with_tenant(percents(v1=100.0, v2=0.0)(known), "acme", "v2"))
    acme = Caller(Tenant("acme"), "ci")

    assert await served(runtime, 1) == "v1"
    assert await served(runtime, 1, caller=acme) == "v2"
    assert await served(runtime, 1, asked_revision="v2") == "v2"
    assert await served(runtime, 1, asked_revision="v3") == "v1", "a client reaches no revision without a weight"


async def test_what_belongs_to_no_session_follows_the_weights(start_runtime: Any) -> None:
    runtime = await start_runtime(instances=FLEET)
    await weigh(runtime, percents(v1=0.0, v2=100.0))

    for number in range(20):
        about = {"path": "/v1/audio/transcriptions", "request_id": f"passed-on-{number}"}
        live = await runtime.intake.place(request(**about))
        live.finish(Outcome.COMPLETED)
        assert OF[live.machine.instance_id] == "v2"


async def test_without_the_store_the_weights_decide(start_runtime: Any) -> None:
    async def away(*_: object) -> None:
        raise StoreUnavailableError("away")

    tampered: list[Tampered] = []

    def through(store: MemoryStore) -> Tampered:
        tampered.append(Tampered(store))
        return tampered[0]

    runtime = await start_runtime(instances=FLEET, through=through)
    await weigh(runtime, percents(v1=0.0, v2=100.0))
    tampered[0].before["home"] = away

    assert await served(runtime, 1) == "v2"


@pytest.mark.parametrize("labelled", [True, False])
async def test_without_weights_labels_do_not_matter(
    start_runtime: Callable[..., Awaitable[Runtime]], labelled: bool
) -> None:
    instances = FLEET if labelled else tuple(spec(name) for name in OF)
    runtime = await start_runtime(instances=instances)

    placed = await all_served(runtime)

    assert {*placed.values()} == {"v1", "v2", "v3"}
    live = await runtime.intake.place(request())
    assert live.machine.spec.revision == ""
