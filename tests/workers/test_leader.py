"""Elections: one leader at a time, none past its lease, none that a paused process can fake."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dualmap.scheduling.state.instance import InstanceState
from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreError
from dualmap.statestore.leases import Lease
from dualmap.statestore.pool import PoolStore
from dualmap.workers.leader import Election, Term, TermAction, plan_term
from dualmap.workers.metrics import WorkerMetrics
from dualmap.workers.settings import WorkerSettings
from tests.support.manual_clock import ManualClock
from tests.workers.contexts import context_of
from tests.workers.doing import AddInstance
from tests.workers.flaky_pool import FlakyPool

LEASE_S = 3.0


class Office:
    """What a test leader does: nothing, but it can be watched."""

    def __init__(self) -> None:
        self.fences: list[int] = []
        self.active = 0
        self.failure: Exception | None = None

    async def lead(self, lease: Lease) -> None:
        self.fences.append(lease.fence)
        self.active += 1
        try:
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
            await asyncio.Event().wait()
        finally:
            self.active -= 1


Campaign = Callable[..., tuple[Election, Office, asyncio.Task[None]]]


@pytest.fixture
async def campaign(clock: ManualClock, metrics: WorkerMetrics) -> AsyncIterator[Campaign]:
    """Start an election campaign: ``election, office, task = campaign(pool, "w1")``."""
    tasks = []

    def start(pool: Any, owner: str, lead: Any = None) -> Any:
        office = Office()
        worker = WorkerSettings(lease_s=LEASE_S)
        context = context_of(pool, worker=worker, worker_id=owner, clock=clock, metrics=metrics)
        election = Election(context, stop_timeout_s=0.05)
        task = asyncio.create_task(election.run(lead or office.lead))
        tasks.append(task)
        return election, office, task

    yield start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("age_s", "step"),
    [
        (0.0, TermAction.WAIT),
        (LEASE_S / 3 - 0.01, TermAction.WAIT),
        (LEASE_S / 3, TermAction.RENEW),
        (LEASE_S - 0.01, TermAction.RENEW),
        (LEASE_S, TermAction.STEP_DOWN),
        (LEASE_S * 100, TermAction.STEP_DOWN),
    ],
)
def test_a_term_is_renewed_from_a_third_of_its_lease_and_over_at_its_end(age_s: float, step: TermAction) -> None:
    assert plan_term(Term(Lease("w1", 1, 0), renewed_s=50.0), 50.0 + age_s, LEASE_S) is step


async def test_of_two_campaigners_one_leads_and_goes_on_leading(
    clock: ManualClock, pool: PoolStore, campaign: Campaign
) -> None:
    first, first_office, _ = campaign(pool, "w1")
    second, second_office, _ = campaign(pool, "w2")

    await clock.advance(LEASE_S * 10)

    assert [first_office.active, second_office.active] == [1, 0]
    assert first.lease is not None and second.lease is None
    assert len(first_office.fences) == 1, "one unbroken term"


async def test_a_leader_that_vanishes_is_replaced_within_its_lease(
    clock: ManualClock, pool: PoolStore, campaign: Campaign
) -> None:
    # given a leader that died without a word
    assert await pool.leader_lease.acquire("dead", int(LEASE_S * 1000)) is not None
    _, office, _ = campaign(pool, "w2")

    # when its lease and one retry of the other have passed
    await clock.advance(LEASE_S + LEASE_S / 3)

    assert office.active == 1


async def test_cancelling_stops_the_jobs_and_gives_the_lease_back_at_once(
    clock: ManualClock, pool: PoolStore, campaign: Campaign
) -> None:
    _, first_office, first_task = campaign(pool, "w1")
    _, second_office, _ = campaign(pool, "w2")
    await clock.advance(0.1)

    first_task.cancel()
    await clock.advance(LEASE_S / 3)  # far less than what is left of the lease

    assert [first_office.active, second_office.active] == [0, 1]
    assert second_office.fences[0] > first_office.fences[0]


async def test_a_leader_whose_store_is_away_steps_down_after_its_lease_by_its_own_clock(
    clock: ManualClock, flaky: FlakyPool, campaign: Campaign, value: Callable[..., float]
) -> None:
    election, office, _ = campaign(flaky, "w1")
    await clock.advance(0.1)

    flaky.away = True
    await clock.advance(LEASE_S / 3)
    assert office.active == 1, "one missed renewal costs nothing"

    await clock.advance(LEASE_S)
    assert office.active == 0
    assert election.lease is None
    assert value("dualmap_worker_leader") == 0
    assert value("dualmap_worker_terms_total", event="expired") == 1


async def test_a_short_outage_does_not_end_a_term(clock: ManualClock, flaky: FlakyPool, campaign: Campaign) -> None:
    _, office, _ = campaign(flaky, "w1")
    await clock.advance(0.1)

    flaky.away = True
    await clock.advance(LEASE_S / 2)
    flaky.away = False
    await clock.advance(LEASE_S * 5)

    assert office.active == 1
    assert len(office.fences) == 1


async def test_a_worker_leads_again_when_the_store_comes_back(
    clock: ManualClock, flaky: FlakyPool, campaign: Campaign
) -> None:
    _, office, _ = campaign(flaky, "w1")
    await clock.advance(0.1)
    flaky.away = True
    await clock.advance(LEASE_S * 5)
    assert office.active == 0

    flaky.away = False
    await clock.advance(LEASE_S)

    assert office.active == 1
    assert office.fences[1] > office.fences[0]


@pytest.mark.parametrize("error", [StoreConfigurationError("NOAUTH"), StoreError("no such command")], ids=repr)
async def test_a_store_that_refuses_its_calls_ends_a_term_and_no_campaign(
    clock: ManualClock, flaky: FlakyPool, campaign: Campaign, error: Any
) -> None:
    # given a leader and a campaigner whose calls a new master refuses
    flaky.error = error
    _, first_office, first_task = campaign(flaky, "w1")
    _, second_office, second_task = campaign(flaky, "w2")
    await clock.advance(0.1)
    flaky.away = True

    await clock.advance(LEASE_S * 3)
    assert not first_task.done() and not second_task.done()
    assert (first_office.active, second_office.active) == (0, 0), "stepped down when the lease may have run out"

    flaky.away = False
    await clock.advance(LEASE_S)
    assert first_office.active + second_office.active == 1


async def test_a_lease_that_cannot_be_released_does_not_keep_a_worker_from_stopping(
    clock: ManualClock, flaky: FlakyPool, campaign: Campaign
) -> None:
    flaky.error = StoreConfigurationError("NOPERM")
    _, office, task = campaign(flaky, "w1")
    await clock.advance(0.1)
    flaky.away = True

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert office.active == 0
    assert flaky.calls[-1] == "release"


async def test_what_a_suspended_leader_writes_after_its_lease_is_refused(
    clock: ManualClock, pool: PoolStore, campaign: Campaign, add_instance: AddInstance
) -> None:
    # given a leader that is suspended for longer than its lease, and a successor
    await add_instance("a")
    first, first_office, _ = campaign(pool, "w1")
    await clock.advance(0.1)
    old = first.lease
    assert old is not None
    clock.jump(LEASE_S * 2)
    assert await pool.leader_lease.acquire("w2", 60_000) is not None

    # when it wakes up and writes before it looks at its clock
    with pytest.raises(LeaseLostError):
        await pool.members.set_instance_state("a", InstanceState.DOWN, fence=old.fence)
    with pytest.raises(LeaseLostError):
        await pool.upkeep.repair(fence=old.fence)

    # then its own election notices, too
    await clock.advance(LEASE_S / 2)
    assert first_office.active == 0
    assert (await pool.membership()).instances["a"].state is InstanceState.READY


async def test_a_refused_write_of_a_job_ends_the_term(
    clock: ManualClock, pool: PoolStore, campaign: Campaign, value: Callable[..., float]
) -> None:
    office = Office()
    office.failure = LeaseLostError("refused")
    campaign(pool, "w1", office.lead)

    await clock.advance(LEASE_S * 2)

    assert value("dualmap_worker_terms_total", event="lost") == 1
    assert office.active == 1, "it campaigned again"


async def test_failing_work_gives_the_leadership_to_somebody_else(
    clock: ManualClock, pool: PoolStore, campaign: Campaign, value: Callable[..., float]
) -> None:
    broken = Office()
    broken.failure = RuntimeError("defect")
    campaign(pool, "w1", broken.lead)
    await clock.advance(0.0)

    assert value("dualmap_worker_terms_total", event="failed") == 1
    assert await pool.leader_lease.acquire("w2", 1000) is not None


async def test_jobs_that_do_not_stop_hold_the_election_no_longer_than_the_bound(
    clock: ManualClock, flaky: FlakyPool, campaign: Campaign
) -> None:
    # given a job that ignores being cancelled
    freed = asyncio.Event()

    async def stubborn(lease: Lease) -> None:
        while not freed.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await freed.wait()

    _, _, task = campaign(flaky, "w1", stubborn)
    await clock.advance(0.1)

    task.cancel()
    _, pending = await asyncio.wait({task}, timeout=5)

    assert not pending
    assert flaky.calls[-1] == "release"
    freed.set()
    await asyncio.sleep(0)
