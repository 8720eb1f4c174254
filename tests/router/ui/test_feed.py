"""The frames of the live page: one reading for all viewers, nothing without viewers."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.errors import RateLimitError
from dualmap.router.replica.peer_watch import FIRST_S
from dualmap.router.telemetry.traffic import INFO_FIELD, TrafficCounts
from dualmap.router.ui.figures import LOAD_FIELDS, REQUEST_FIELDS
from dualmap.router.ui.own_requests import NEW_REQUESTS
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.scaling.scale_record import ScaleEntry, ScaleRecord
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.tenants.budgets import Limit, Measure, Period
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from dualmap.statestore.call_values import DiscoveryStatus
from dualmap.statestore.errors import StoreUnavailableError
from tests.router import tools
from tests.router.ui.viewers import Viewer, feed_of


async def test_a_new_viewer_is_told_everything_and_then_what_is_new(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    (await runtime.intake.place(tools.request("x" * 400, request_id="one"))).finish(Outcome.COMPLETED)
    viewer = Viewer(feed_of(runtime))

    event, hello = await viewer.read()
    (await runtime.intake.place(tools.request("x" * 400, request_id="two"))).finish(Outcome.COMPLETED)
    await clock.advance(1.0)
    next_event, tick = await viewer.read()

    assert (event, next_event) == ("hello", "tick")
    assert hello["load_fields"] == ["id", "state", *LOAD_FIELDS]
    assert hello["request_fields"] == list(REQUEST_FIELDS)
    assert [row[0] for row in hello["requests"]] == ["one"]
    assert [row[0] for row in tick["requests"]] == ["two"]
    assert [row[0] for row in tick["pools_now"]["default"]["loads"]] == ["a", "b"]
    assert {len(row) for row in tick["pools_now"]["default"]["loads"]} == {len(hello["load_fields"])}
    assert {len(row) for row in tick["requests"]} == {len(REQUEST_FIELDS)}
    [[_, blocks, requests, first, second, pair]] = tick["pools_now"]["default"]["keys"]
    assert (requests, sorted(pair)) == (2, ["a", "b"])
    assert blocks >= 1
    assert 0 <= first < 1
    assert 0 <= second < 1
    await viewer.close()


async def test_all_viewers_share_one_reading_a_second_and_the_last_one_ends_it(start_runtime: Any, clock: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0])
    feed = feed_of(runtime)
    viewers = [Viewer(feed) for _ in range(5)]

    def readings() -> int:
        return int(tampered[0].calls.count("overview"))

    assert [(await viewer.read())[0] for viewer in viewers] == ["hello"] * 5
    assert readings() == 1
    await clock.advance(1.0)
    assert [(await viewer.read())[0] for viewer in viewers] == ["tick"] * 5
    assert readings() == 2
    for viewer in viewers:
        await viewer.close()
    await clock.advance(FIRST_S - 2.0)  # soon the replica reads once who its peers are

    assert readings() == 2
    assert feed.viewers == 0


async def test_a_viewer_that_fell_behind_is_told_everything_again(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    feed = feed_of(runtime)
    slow = Viewer(feed)
    await slow.read()

    for _ in range(8):
        await clock.advance(1.0)

    assert (await slow.read())[0] == "hello"
    await slow.close()


async def test_members_that_come_and_go_are_told_with_their_new_rings(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    viewer = Viewer(feed_of(runtime))
    _, hello = await viewer.read()
    await store.pool("default").members.put_instance(tools.spec("b"))
    await runtime.pools.pools["default"].view.refresh()

    await clock.advance(1.0)
    _, tick = await viewer.read()

    assert hello["topology"]["default"]["members"] == ["a"]
    assert set(hello["topology"]["default"]["rings"][0]) == {0}
    assert tick["topology"]["default"]["members"] == ["a", "b"]
    assert set(tick["topology"]["default"]["rings"][0]) == {0, 1}
    assert [happened[2:] for happened in tick["happened"]] == [["scale", "b joined as ready"]]
    await clock.advance(1.0)
    assert (await viewer.read())[1]["topology"] == {}
    await viewer.close()


async def test_a_store_that_is_away_is_said_and_ends_nothing(start_runtime: Any, clock: Any) -> None:
    tampered: list[Any] = []
    runtime = await start_runtime(through=lambda store: tampered.append(tools.Tampered(store)) or tampered[0])
    viewer = Viewer(feed_of(runtime))
    await viewer.read()

    async def away(*_: Any) -> None:
        raise StoreUnavailableError("away")

    tampered[0].before["overview"] = away
    await clock.advance(1.0)
    tick = (await viewer.read())[1]
    assert "loads" not in tick["pools_now"]["default"]
    assert tick["problems"][0]["severity"] == "critical"
    assert "store" in tick["problems"][0]["what"]
    assert not tick["problems"][0]["or_longer"], "it was not there at the first reading"
    del tampered[0].before["overview"]
    await clock.advance(1.0)
    tick = (await viewer.read())[1]
    assert "loads" in tick["pools_now"]["default"]
    assert not any("store" in problem["what"] for problem in tick["problems"])
    await viewer.close()


async def test_a_replica_that_drains_ends_its_streams(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime()
    viewer = Viewer(feed_of(runtime))
    await viewer.read()

    runtime.context.draining = True
    await clock.advance(1.0)
    with pytest.raises(StopAsyncIteration):
        await viewer.read()
        await viewer.read()


async def test_scale_steps_are_told_once_as_their_log_has_them(start_runtime: Any, store: Any, clock: Any) -> None:
    pool, runtime = store.pool("default"), await start_runtime(instances=(tools.spec("a"),))
    lease = await pool.leader_lease.acquire("worker-1", 60_000)
    first, second = (
        ScaleEntry(at_ms, 1, event, "2 → 3: queues grow") for at_ms, event in ((5, "decided"), (9, "ready"))
    )
    await pool.publications.record_scaling(ScaleRecord(decision_id=1), first, fence=lease.fence)
    viewer = Viewer(feed_of(runtime))

    _, hello = await viewer.read()
    await pool.publications.record_scaling(ScaleRecord(decision_id=1), second, fence=lease.fence)
    await clock.advance(1.0)
    _, tick = await viewer.read()

    assert [told[1:] for told in hello["happened"]] == [["default", "scale", "decided: 2 → 3: queues grow"]]
    assert [told[3] for told in tick["happened"] if told[2] == "scale"] == ["ready: 2 → 3: queues grow"]
    await clock.advance(1.0)
    assert (await viewer.read())[1]["happened"] == []
    await viewer.close()


async def test_the_page_says_that_discovery_fails_and_why(start_runtime: Any, clock: Any, store: Any) -> None:
    entered = InstanceSpec("a", "http://a.test:8000", origin={"uid": "u"})
    runtime = await start_runtime(instances=(entered,))
    pool = store.pool("default")
    lease = await pool.leader_lease.acquire("leader", 60_000)
    viewer = Viewer(feed_of(runtime))
    await viewer.read()
    failing = DiscoveryStatus(5, "leader", "pods", "failing", "403 pods is forbidden")
    await pool.publications.record_discovery(failing, fence=lease.fence)

    await clock.advance(1.0)
    tick = (await viewer.read())[1]
    await viewer.close()

    told = [problem["why"] for problem in tick["problems"] if problem["what"] == "Discovery fails"]
    assert len(told) == 1 and "403 pods is forbidden" in told[0]


async def test_the_page_says_why_an_instance_does_not_serve(start_runtime: Any, clock: Any, store: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"), tools.spec("b")))
    pool = store.pool("default")
    lease = await pool.leader_lease.acquire("leader", 60_000)
    viewer = Viewer(feed_of(runtime))
    await viewer.read()
    await pool.members.note_instance("b", "connection refused by b.test:8000", fence=lease.fence)

    await clock.advance(1.0)
    tick = (await viewer.read())[1]
    await viewer.close()

    trouble = tick["pools_now"]["default"]["troubles"]["b"]
    assert (trouble["what"], trouble["why"]) == ("b is in trouble", "connection refused by b.test:8000")
    assert "http://b.test:8000" in trouble["advice"]
    assert trouble["what"] in [problem["what"] for problem in tick["problems"]]
    assert [each[2:] for each in tick["happened"]] == [["trouble", "b: connection refused by b.test:8000"]]


async def test_what_the_replica_refused_and_which_instances_failed_is_said_for_a_minute(
    start_runtime: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    runtime.context.metrics.refused(429, "queue_full")  # before anybody looked
    viewer = Viewer(feed_of(runtime))
    _, hello = await viewer.read()
    runtime.context.metrics.refused(429, "queue_full")
    for _ in range(3):
        runtime.context.metrics.pools["default"].count_fault("a", "status_500")

    await clock.advance(1.0)
    told = [problem["what"] for problem in (await viewer.read())[1]["problems"]]
    for _ in range(61):
        await clock.advance(1.0)
        _, later = await viewer.read()
    await viewer.close()

    words = ("a fails requests", "1 request refused in the last minute: queue_full")
    assert not {problem["what"] for problem in hello["problems"]} & set(words)
    assert set(words) <= set(told)
    assert not {problem["what"] for problem in later["problems"]} & set(words)


async def test_rows_of_failed_requests_outlive_those_that_went_well(start_runtime: Any, clock: Any) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    viewer = Viewer(feed_of(runtime))
    await viewer.read()
    (await runtime.intake.place(tools.request("x" * 40, request_id="bad"))).finish(Outcome.UPSTREAM_FAILED)
    for number in range(30):
        request = tools.request("x" * 40, request_id=f"good-{number}")
        (await runtime.intake.place(request)).finish(Outcome.COMPLETED)

    await clock.advance(1.0)
    rows = (await viewer.read())[1]["requests"]
    await viewer.close()

    assert len(rows) == NEW_REQUESTS + 1
    assert {"bad", "good-29"} <= {row[0] for row in rows}
    assert rows[0][0] == "bad"
    assert rows[0][REQUEST_FIELDS.index("notable")]


async def test_quantiles_can_be_read_from_what_replicas_wrote_into_their_leases(
    start_runtime: Any, store: Any, clock: Any
) -> None:
    runtime = await start_runtime(instances=(tools.spec("a"),))
    counts = TrafficCounts(ended=2, output_tokens=64, ttft_buckets=(0, 2, *(0,) * 16))
    for name in ("one", "two"):
        await store.pool("default").heartbeat(name, 60_000, {INFO_FIELD: counts.to_text()})
    viewer = Viewer(feed_of(runtime))
    _, hello = await viewer.read()
    await viewer.close()

    traffic = hello["pools_now"]["default"]["traffic"]
    assert (traffic["output_tokens"], traffic["ttft_buckets"][:3]) == (128, [0, 4, 0])
    assert len(hello["pools"][0]["ttft_bounds_s"]) == len(traffic["ttft_buckets"]) - 1


async def test_a_tenant_at_its_limit_is_named_on_any_replicas_page_and_in_the_row_of_its_request(
    start_runtime: Any, clock: Any, store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await start_runtime(instances=(tools.spec("a"),)), await start_runtime()
    viewer = Viewer(feed_of(two))
    await viewer.read()
    limit = Limit(Measure.REQUESTS, Period.MINUTE, 1)
    caller = Caller(Tenant("acme", limits=(limit,)), "ci", b"")
    (await one.intake.place(tools.request(caller=caller))).finish(Outcome.COMPLETED)
    with pytest.raises(RateLimitError):
        await one.intake.place(tools.request(caller=caller, request_id="kept-out"))

    told: list[dict[str, Any]] = []
    for _ in range(8):
        await clock.advance(1.0)
        told = (await viewer.read())[1]["problems"]
    await viewer.close()
    [problem] = [each for each in told if each["key"] == "limited/acme"]
    assert (problem["what"], problem["severity"]) == ("Tenant acme is at its limit", "notice")
    assert "requests_per_minute refused 1 request" in problem["why"]
    assert "tenant acme is at its limit requests_per_minute of 1" in caplog.text

    own = Viewer(feed_of(one))
    _, hello = await own.read()
    await own.close()
    rows = [dict(zip(REQUEST_FIELDS, row, strict=True)) for row in hello["requests"]]
    [row] = [row for row in rows if row["id"] == "kept-out"]
    assert (row["tenant"], row["outcome"], row["late"]) == ("acme", "refused", False)
    assert "0 of 1 requests a minute were left" in row["limited"]
