"""Who hears that an instance left, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dualmap.router.pool.instance_loss import GONE_S, InstanceLossNotifier
from dualmap.scheduling.request.retry_budget import RetryBudget
from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceState
from dualmap.scheduling.state.view import ClusterView
from tests.router import tools


class Try:
    def __init__(self, *, has_begun: bool = False) -> None:
        self.has_begun = has_begun
        self.told: list[str] = []
        self.told_of_down = 0
        self.leaves: list[str] = []

    def instance_leaves(self, why: str) -> None:
        self.leaves.append(why)

    def instance_down(self, why: str) -> None:
        self.told_of_down += 1

    def instance_lost(self, why: str) -> bool:
        self.told.append(why)
        return not self.has_begun


@pytest.fixture
def loss_notifier(clock: Any) -> InstanceLossNotifier:
    return InstanceLossNotifier(RetryBudget(share=0.0, per_s=1.0, now_s=clock.monotonic_s()), clock)


@pytest.fixture
def view_of() -> Any:
    def view(**states: InstanceState) -> ClusterView:
        instances = {name: tools.spec(name, state=state) for name, state in states.items()}
        return ClusterView.build(epoch=1, tree_version=0, instances=instances, tree=HotnessTree(), virtual_nodes=4)

    return view


READY, DOWN = InstanceState.READY, InstanceState.DOWN


def test_only_who_waits_for_the_instance_that_went_down_is_told(
    loss_notifier: InstanceLossNotifier, view_of: Any
) -> None:
    on_a, on_b = Try(), Try()
    loss_notifier.watch("a", on_a)
    loss_notifier.watch("b", on_b)

    loss_notifier.check(view_of(a=READY, b=READY))
    loss_notifier.check(view_of(a=DOWN, b=READY))

    assert on_a.told == ["instance a was taken down"]
    assert on_b.told == []


def test_who_left_is_not_told(loss_notifier: InstanceLossNotifier, view_of: Any) -> None:
    stays, left = Try(), Try()
    loss_notifier.watch("a", stays)
    loss_notifier.watch("a", left)
    loss_notifier.unwatch("a", left)
    loss_notifier.unwatch("a", left)
    loss_notifier.unwatch("unheard-of", left)

    loss_notifier.check(view_of(a=DOWN, b=READY))

    assert (len(stays.told), left.told) == (1, [])


def test_an_instance_that_drains_finishes_what_it_has(loss_notifier: InstanceLossNotifier, view_of: Any) -> None:
    waiting = Try()
    loss_notifier.watch("a", waiting)

    loss_notifier.check(view_of(a=InstanceState.DRAINING, b=READY))

    assert waiting.told == []


def test_without_another_instance_everyone_stays_until_there_is_one(
    loss_notifier: InstanceLossNotifier, view_of: Any
) -> None:
    waiting = Try()
    loss_notifier.watch("a", waiting)
    loss_notifier.check(view_of(a=DOWN, b=DOWN))
    assert waiting.told == []

    loss_notifier.check(view_of(a=DOWN, b=READY))

    assert len(waiting.told) == 1


def test_as_many_are_told_as_may_be_tried_again_and_the_others_later(
    loss_notifier: InstanceLossNotifier, view_of: Any, clock: Any
) -> None:
    tries = [Try() for _ in range(25)]  # the budget: 10 at once, one a second
    for each in tries:
        loss_notifier.watch("a", each)

    def check() -> int:
        loss_notifier.check(view_of(a=DOWN, b=READY))
        told = [each for each in tries if each.told]
        for each in told:
            loss_notifier.unwatch("a", each)
            tries.remove(each)
            loss_notifier._retries.withdraw(clock.monotonic_s())
        return len(told)

    assert check() == 10
    assert check() == 0
    clock.now_s += 3.0
    assert check() == 3


def test_answers_that_have_begun_take_no_ones_retry(loss_notifier: InstanceLossNotifier, view_of: Any) -> None:
    tries = [Try(has_begun=True) for _ in range(50)] + [Try() for _ in range(5)]
    for each in tries:
        loss_notifier.watch("a", each)

    loss_notifier.check(view_of(a=DOWN, b=READY))

    assert all(each.told for each in tries if not each.has_begun)


def test_answers_that_have_begun_are_told_at_every_check_while_their_instance_is_down(
    loss_notifier: InstanceLossNotifier, view_of: Any, clock: Any
) -> None:
    begun = Try(has_begun=True)
    loss_notifier.watch("a", begun)
    for view in (view_of(a=READY), view_of(a=DOWN), view_of(a=DOWN, b=READY), view_of(a=READY)):
        loss_notifier.check(view)
    assert begun.told_of_down == 2, "whether or not another instance is ready"

    loss_notifier.check(view_of(a=InstanceState.STANDBY, b=READY))
    clock.now_s += GONE_S
    loss_notifier.check(view_of(a=InstanceState.STANDBY, b=READY))
    assert begun.told_of_down == 2, "out of service is not down: its server may be well"


@pytest.mark.parametrize("state", [InstanceState.STANDBY, InstanceState.STARTING])
def test_an_instance_that_stays_out_of_service_is_lost_however_it_got_there(
    loss_notifier: InstanceLossNotifier, view_of: Any, clock: Any, state: InstanceState
) -> None:
    waiting = Try()
    loss_notifier.watch("a", waiting)
    loss_notifier.check(view_of(a=state, b=READY))
    clock.now_s += GONE_S - 1
    loss_notifier.check(view_of(a=state, b=READY))
    assert waiting.told == [], "a passed request, which no drain waits for, may just be coming to its end"

    clock.now_s += 1
    loss_notifier.check(view_of(a=state, b=READY))

    assert waiting.told == ["instance a was taken out of service"]


def test_a_request_that_was_not_told_of_a_down_instance_yet_is_told_when_an_operator_takes_it_out(
    loss_notifier: InstanceLossNotifier, view_of: Any, clock: Any
) -> None:
    tries = [Try() for _ in range(11)]  # the budget: 10 at once, one a second
    for each in tries:
        loss_notifier.watch("a", each)
    loss_notifier.check(view_of(a=DOWN, b=READY))
    for each in [each for each in tries if each.told]:
        loss_notifier.unwatch("a", each)
        loss_notifier._retries.withdraw(clock.monotonic_s())
    assert [len(each.told) for each in tries].count(0) == 1

    clock.now_s += GONE_S
    loss_notifier.check(view_of(a=InstanceState.STANDBY, b=READY))

    assert all(each.told for each in tries)


def test_an_instance_counts_as_gone_when_it_stays_missing(
    loss_notifier: InstanceLossNotifier, view_of: Any, clock: Any
) -> None:
    waiting = Try()
    loss_notifier.watch("a", waiting)
    loss_notifier.check(view_of(b=READY))
    clock.now_s += GONE_S - 1
    loss_notifier.check(view_of(b=READY))
    assert waiting.told == [], "a store may just be filled again"

    loss_notifier.check(view_of(a=READY, b=READY))
    clock.now_s += 2
    loss_notifier.check(view_of(b=READY))
    assert waiting.told == [], "it was back meanwhile"

    clock.now_s += GONE_S
    loss_notifier.check(view_of(b=READY))
    assert waiting.told == ["instance a was removed"]


@pytest.mark.parametrize(("own_s", "pool_s", "within_s"), [(3.0, None, 3.0), (3.0, 20.0, 3.0), (None, 5.0, 5.0)])
async def test_all_that_a_draining_instance_has_leaves_after_the_time_for_that(
    clock: Any, own_s: float | None, pool_s: float | None, within_s: float
) -> None:
    loss_notifier = InstanceLossNotifier(RetryBudget(0.0, 1.0, clock.monotonic_s()), clock, pool_s)
    on_a, on_b = Try(has_begun=True), Try()
    loss_notifier.watch("a", on_a)
    loss_notifier.watch("b", on_b)
    draining = replace(tools.spec("a", state=InstanceState.DRAINING), drain_within_s=own_s)
    instances = {"a": draining, "b": tools.spec("b", state=READY)}
    view = ClusterView.build(epoch=1, tree_version=0, instances=instances, tree=HotnessTree(), virtual_nodes=4)

    loss_notifier.check(view)
    await clock.advance(within_s - 0.1)
    loss_notifier.check(view)
    assert on_a.leaves == []
    await clock.advance(0.1)
    loss_notifier.check(view)

    assert (on_a.leaves, on_b.leaves, on_a.told) == (["instance a drains"], [], [])


async def test_a_drain_without_a_time_and_one_without_another_instance_leave_everything_where_it_is(
    clock: Any, loss_notifier: InstanceLossNotifier, view_of: Any
) -> None:
    alone = InstanceLossNotifier(RetryBudget(0.0, 1.0, clock.monotonic_s()), clock, 1.0)
    on_a, draining = Try(), InstanceState.DRAINING
    for notifier, view in ((loss_notifier, view_of(a=draining, b=READY)), (alone, view_of(a=draining))):
        notifier.watch("a", on_a)
        notifier.check(view)
        await clock.advance(5.0)
        notifier.check(view)

    assert on_a.leaves == []
