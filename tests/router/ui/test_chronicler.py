"""What happened is on record without a viewer, over replicas, and for those who come later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dualmap.router.ui.chronicler import (
    LAST_MINUTES_S,
    RECENT_SAMPLES,
    STEP_S,
    Chronicler,
    counts_of,
    ended,
    followed,
    growth,
    recent_traffic,
)
from dualmap.router.ui.problems import Problem, Severity
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.leases import FAULTS_FIELD, REFUSALS_FIELD, ReplicaInfo
from dualmap.statestore.pool.chronicle import ChronicleRecord
from tests.router import tools
from tests.router.ui.viewers import Viewer, feed_of


async def chronicled(*runtimes: Any) -> None:
    """Let replicas keep the record."""
    for runtime in runtimes:
        runtime.keep_running("chronicle", Chronicler(runtime).run)


async def test_of_several_replicas_one_makes_each_step_and_nothing_is_told_twice(
    start_runtime: Any, clock: Any, store: Any
) -> None:
    one, two = await start_runtime(instances=(tools.spec("a"),)), await start_runtime()
    await chronicled(one, two)
    await clock.advance(2 * STEP_S)
    await store.pool("default").members.put_instance(tools.spec("b"))
    await clock.advance(10 * STEP_S)

    chronicle = store.pool("default").chronicle
    lines = [each.text for each in await chronicle.happened(100)]
    assert lines.count("b joined as ready") == 1
    samples = await chronicle.samples(100)
    assert len({each.at_ms for each in samples}) == len(samples) == 13
    assert sum(each.over_s for each in samples) == pytest.approx(12 * STEP_S)


async def test_counts_are_on_record_whichever_replica_takes_the_step_and_after_one_died(
    start_runtime: Any, clock: Any, store: Any
) -> None:
    one, two = await start_runtime(instances=(tools.spec("a"),)), await start_runtime()
    await chronicled(one)
    await clock.advance(2 * STEP_S)
    for runtime in (one, two):
        for outcome in (Outcome.COMPLETED, Outcome.UPSTREAM_FAILED):
            (await runtime.intake.place(tools.request())).finish(outcome)
    one.context.metrics.refused(429, "queue_full")
    await clock.advance(4.0)  # both report it
    await one._supervisor.stop()  # as if it were killed
    await chronicled(two)
    await clock.advance(2 * STEP_S)

    chronicle = store.pool("default").chronicle
    record, samples = await chronicle.last_record(), await chronicle.samples(RECENT_SAMPLES)
    recent, over_s = recent_traffic(record, samples)
    assert (recent.arrived, recent.answered, recent.failed, recent.on_time, recent.late) == (4, 2, 2, 2, 2)
    assert over_s == pytest.approx((record.at_ms - samples[-1].at_ms) / 1000)
    assert sum(each.counts.get("refusal:queue_full", 0) for each in samples) == 1


async def test_an_overload_that_is_over_is_there_for_who_opens_any_replicas_page_later(
    start_runtime: Any, clock: Any, store: Any
) -> None:
    one, two = await start_runtime(instances=(tools.spec("a"),)), await start_runtime()
    await chronicled(one, two)
    await clock.advance(2 * STEP_S)
    waiting = [asyncio.create_task(one.intake.place(tools.request("x" * 40_000))) for _ in range(12)]
    await clock.advance(20.0)
    known = (await store.pool("default").chronicle.last_record()).problems
    [overload] = [each for each in known if each.key == "default/late"]
    assert overload.what.startswith("Overload: ")
    assert "overdue" in overload.why
    for each in waiting:
        each.cancel()
    await one.stop()
    await clock.advance(300.0)

    viewer = Viewer(feed_of(two))
    _, hello = await viewer.read()
    await viewer.close()
    [over] = [each for each in hello["over"] if each["key"] == "default/late"]
    assert over["until_s"] - over["since_s"] >= 10.0
    told = [line[3] for line in hello["happened"]]
    assert any(text.startswith("Overload: ") for text in told)
    assert any(text.startswith("over, after ") and "Overload" in text for text in told)
    columns = [dict(zip(hello["sample_fields"], row, strict=True)) for row in hello["samples"]["default"]]
    assert max(row["overdue"] for row in columns) >= 10
    assert sum(row["arrived"] for row in columns) == 12
    assert columns == sorted(columns, key=lambda row: row["at_s"])


async def test_since_when_a_problem_lasts_is_known_to_a_page_that_was_just_opened(
    start_runtime: Any, clock: Any, store: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a", state=InstanceState.DOWN),))
    await chronicled(runtime)
    began_s = clock.now_s
    await clock.advance(120.0)

    viewer = Viewer(feed_of(runtime))
    _, hello = await viewer.read()
    await viewer.close()
    [problem] = [each for each in hello["problems"] if each["what"] == "No instance is ready"]
    assert problem["since_s"] <= began_s + STEP_S
    assert not problem["or_longer"]


def test_a_problem_is_over_once_it_was_not_found_for_a_while_and_kept_for_the_last_minutes() -> None:
    problem = Problem("default/late", Severity.WARNING, "30 % late", "why", "advice")
    known, told = followed((), [problem], 10_000)
    assert told == [("trouble", "30 % late")]
    known, told = followed(known, [], 20_000)
    assert (told, known[0].until_ms) == ([], None), "it may come back at once"
    known, told = followed(known, [problem], 24_000)
    assert told == []
    known, told = followed(known, [], 40_000)
    assert told == [("good", "over, after 14 s: 30 % late")]
    assert [each.until_ms for each in ended(known, 50_000)] == [24_000]
    known, told = followed(known, [problem], 60_000)
    assert told == [("trouble", "30 % late")]
    assert known[0].since_ms == 60_000
    known, _ = followed(known, [], 90_000)
    assert followed(known, [], round(90_000 + 1000 * LAST_MINUTES_S))[0] == []


def test_a_problem_is_remembered_as_it_was_when_it_was_worst() -> None:
    bad, worse = (
        Problem("default/late", Severity.WARNING, what, "why", "advice", weight=weight)
        for what, weight in (("30 % late", 0.3), ("Overload: 60 % late", 1.6))
    )
    known, _ = followed((), [bad], 1000)
    for now_ms, problem in ((2000, worse), (3000, bad)):
        known, _ = followed(known, [problem], now_ms)

    assert (known[0].what, known[0].since_ms, known[0].seen_ms) == ("Overload: 60 % late", 1000, 3000)


def test_what_a_fleet_that_starts_lacks_is_not_told_once_it_is_there() -> None:
    missing = Problem("default/ready/False", Severity.CRITICAL, "No instance is ready", "3 starting", "advice")

    known, told = followed((), [missing], 5_000, begins=True)
    assert ([each.key for each in known], told) == (["default/ready/False"], [])
    known, _ = followed(known, [missing], 10_000)
    assert followed(known, [], 15_000) == ([], [])


def test_a_process_that_began_again_counts_from_zero() -> None:
    def replica(process: str, refusals: str) -> ReplicaInfo:
        return ReplicaInfo(
            "r", 1, 1,
            {"process": process, "traffic": "late=3 x", REFUSALS_FIELD: refusals, FAULTS_FIELD: "a/status_500=2 b/x="},
        )  # fmt: skip

    before = counts_of([replica("one", "queue_full=4")])
    assert before == {"r one": {"late": 3, "refusal:queue_full": 4, "fault:a/status_500": 2}}
    assert growth(before, counts_of([replica("one", "queue_full=5")])) == {"refusal:queue_full": 1}
    assert growth(before, counts_of([replica("two", "queue_full=1")]))["refusal:queue_full"] == 1


async def test_a_record_that_cannot_be_read_is_begun_again(start_runtime: Any, clock: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    pool = store.pool("default")
    await pool.chronicle._make(_written(pool, b"no json"))
    assert await pool.chronicle.last_record() == ChronicleRecord()

    assert await Chronicler(runtime).step("default")
    assert (await pool.chronicle.last_record()).states == {"a": "ready"}


def _written(pool: Any, record: bytes) -> Any:
    from dualmap.statestore.pool.changes import Change

    return Change([("HSET", pool.chronicle._keys.chronicle, "at_ms", "broken", "record", record)])
