"""Plans of a queue: Moore-Hodgson against brute force, who is deferred, and how far room goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dualmap.scheduling.placing.policies import queue_order_of
from dualmap.scheduling.queues.queue_order import (
    BAND_MS,
    CALM_WINDOWS,
    DEFERRED_RANK_MS,
    PLAN_LIMIT,
    OnTimePlan,
    PlanStep,
    QueueEntry,
    QueueHead,
    QueueOrder,
    is_calm,
    plan_by_class,
    plan_on_time,
    plan_queue,
    step_rest_tokens,
)
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.tenants.classes import class_band
from dualmap.scheduling.tenants.shares import FIRST_ABOVE

Load = Callable[..., InstanceLoad]
TOKENS_PER_S = 1000.0  # one token per millisecond
NOW_MS = 1_000_000
DEADLINE = QueueOrder(by_deadline=True, max_deferred_s=30.0)
FIFO = QueueOrder(by_deadline=False, max_deferred_s=30.0)

queues = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 30)).map(lambda made: QueueEntry("r", *made)), min_size=1, max_size=6
).map(lambda entries: sorted(entries, key=lambda entry: entry.rank_ms))


def on_time(order: list[QueueEntry], dispatched_tokens: int) -> int:
    end_ms, count = dispatched_tokens, 0
    for entry in order:
        end_ms += entry.uncached_tokens
        count += end_ms <= entry.rank_ms
    return count


@given(queues, st.integers(0, 20))
def test_dispatching_by_the_rule_keeps_as_many_on_time_as_any_order_could(
    queue: list[QueueEntry], dispatched: int
) -> None:
    # given the best that any order of the queue reaches
    best = max(on_time(list(order), dispatched) for order in permutations(queue))
    # when the queue is emptied pick by pick, each behind what was dispatched before
    left, order, ahead = list(queue), [], dispatched
    while left:
        entry = left.pop(plan_on_time(left, 0, ahead, TOKENS_PER_S).first)
        order.append(entry)
        ahead += entry.uncached_tokens
    # then as many are on time
    assert on_time(order, dispatched) == best


def test_the_longest_is_passed_over_for_two_that_fit() -> None:
    queue = [QueueEntry("long", 100, 90), QueueEntry("one", 110, 40), QueueEntry("two", 120, 40)]
    assert plan_on_time(queue, 0, 0, TOKENS_PER_S) == OnTimePlan(1, 90, frozenset({"long"}))


def test_nothing_is_passed_over_in_an_empty_queue() -> None:
    assert plan_on_time([], 0, 1000, TOKENS_PER_S) == OnTimePlan(0, 0)


def test_when_nobody_can_make_it_the_shortest_is_the_likeliest() -> None:
    queue = [QueueEntry("long", 10, 30), QueueEntry("short", 11, 20), QueueEntry("later", 12, 20)]
    assert plan_on_time(queue, 0, 50, TOKENS_PER_S) == OnTimePlan(1, 70, frozenset({"long", "short", "later"}))


def test_what_is_in_a_higher_band_is_passed_over_first_though_it_is_shorter_and_takes_several() -> None:
    queue = [*(QueueEntry(f"over{i}", 60 + i, 20, 3) for i in range(3)), QueueEntry("within", 100, 90)]
    assert plan_on_time(queue, 0, 0, TOKENS_PER_S) == OnTimePlan(3, 60, frozenset({"over0", "over1", "over2"}))


def test_of_the_highest_band_the_longest_is_passed_over() -> None:
    queue = [QueueEntry("within", 100, 50), QueueEntry("short", 100, 20, 2), QueueEntry("long", 100, 40, 2)]
    assert plan_on_time(queue, 0, 0, TOKENS_PER_S) == OnTimePlan(0, 40, frozenset({"long"}))


def test_the_lowest_band_goes_first_of_those_that_are_kept() -> None:
    queue = [QueueEntry("over", 50, 20, 1), QueueEntry("within", 100, 20)]
    assert plan_on_time(queue, 0, 0, TOKENS_PER_S) == OnTimePlan(1, 0)


@given(st.integers(0, BAND_MS - 1), st.integers(0, 255), st.booleans())
def test_a_place_in_the_queue_is_read_back_as_it_was_written(due_ms: int, band: int, late: bool) -> None:
    place = due_ms + band * BAND_MS + (DEFERRED_RANK_MS if late else 0)
    entry = QueueEntry.at("r", place, 10)
    assert (entry.band, entry.deferred, entry.place, float(place)) == (band, late, place, place)
    assert entry.rank_ms == due_ms + (DEFERRED_RANK_MS if late else 0)


@pytest.mark.parametrize(("other_tokens", "rest_tokens"), [(0, 0), (900, 900), (5_000, 1_024)])
def test_the_rest_of_a_step_is_half_of_it_or_what_others_have_to_do(other_tokens: int, rest_tokens: int) -> None:
    assert step_rest_tokens(4096, other_tokens) == rest_tokens


def entry(name: str, due_in_ms: int, tokens: int) -> QueueEntry:
    return QueueEntry(name, NOW_MS + due_in_ms, tokens)


def deferred(name: str, due_in_ms: int, tokens: int) -> QueueEntry:
    return QueueEntry(name, NOW_MS + due_in_ms + DEFERRED_RANK_MS, tokens)


def head(load: InstanceLoad, *entries: QueueEntry) -> QueueHead:
    return QueueHead(NOW_MS, load, entries)


def plan(load: Load, *entries: QueueEntry, order: QueueOrder = DEADLINE, **figures: int | str) -> list[PlanStep]:
    """The steps for a queue, whose tokens are pending beside what is dispatched."""
    dispatched = int(figures.get("dispatched_tokens", 0))
    own = {
        "pending_tokens": dispatched + sum(each.uncached_tokens for each in entries),
        "deferred_tokens": sum(each.uncached_tokens for each in entries if each.deferred),
        "queued_requests": len(entries),
    }
    return [*plan_queue(head(load("a", **{**own, **figures}), *entries), order).steps]


def dispatched(steps: list[PlanStep]) -> list[str]:
    return [step.request_id for step in steps if step.deferred_to_ms is None]


def test_a_plan_names_the_instance_and_the_version_that_it_was_made_for(load: Load) -> None:
    made = plan_queue(head(load("a", version=7), entry("r", 5000, 10)), FIFO)

    assert (made.instance_id, made.version, made.steps) == ("a", 7, (PlanStep("r"),))


@pytest.mark.parametrize("order", [FIFO, DEADLINE])
def test_requests_go_until_the_window_is_full(load: Load, order: QueueOrder) -> None:
    entries = [entry(f"r{number}", 3900, 1000) for number in range(4)]

    assert dispatched(plan(load, *entries, order=order, dispatch_window_tokens=2000)) == ["r0", "r1"]
    assert dispatched(plan(load, *entries, order=order, dispatch_window_tokens=2001)) == ["r0", "r1", "r2"]
    assert plan(load, *entries, order=order, dispatch_window_tokens=2000, dispatched_tokens=2000) == []


@pytest.mark.parametrize(("due_in_ms", "calm"), [(4000, True), (3999, False)])
def test_while_no_deadline_is_at_stake_requests_go_beyond_the_window(load: Load, due_in_ms: int, calm: bool) -> None:
    """All work, 4,000 tokens, is done before the next deadline in whatever order."""
    entries = [entry("next", due_in_ms, 1500), entry("last", 60_000, 1500)]

    steps = plan(load, *entries, dispatched_tokens=1000, dispatch_window_tokens=1000)

    assert dispatched(steps) == (["next", "last"] if calm else [])
    assert dispatched(plan(load, *entries, order=FIFO, dispatched_tokens=1000, dispatch_window_tokens=1000)) == []


def test_an_instance_is_given_four_windows_at_most(load: Load) -> None:
    entries = [entry(f"r{number}", 60_000, 1000) for number in range(9)]

    assert len(dispatched(plan(load, *entries, dispatch_window_tokens=1000))) == CALM_WINDOWS == 4
    assert len(dispatched(plan(load, *entries, dispatch_window_tokens=1000, running_requests=254))) == 2
    assert dispatched(plan(load, *entries, dispatch_window_tokens=1000, state=InstanceState.DOWN)) == []


def test_nothing_goes_beyond_the_window_while_requests_are_deferred(load: Load) -> None:
    late = QueueEntry("late", NOW_MS - 1 + DEFERRED_RANK_MS, 10)
    entries = [entry("next", 60_000, 1500), late]

    assert dispatched(plan(load, *entries, dispatched_tokens=1000, dispatch_window_tokens=1000)) == []


@pytest.mark.parametrize("order", [FIFO, DEADLINE])
def test_requests_go_until_the_instance_runs_as_many_as_it_can(load: Load, order: QueueOrder) -> None:
    entries = [entry(f"r{number}", 60_000, 1) for number in range(4)]

    assert dispatched(plan(load, *entries, order=order, running_requests=3, max_running_requests=5)) == ["r0", "r1"]


@pytest.mark.parametrize(
    ("tokens", "figures", "goes"),
    [
        (5001, {"context_tokens": 44_999, "running_requests": 1}, True),
        (5001, {"context_tokens": 45_000, "running_requests": 1}, False),
        (5000, {"context_tokens": 90_000, "running_requests": 1}, True),  # not long: prefixes may be shared
        (60_000, {}, True),  # nothing runs that would leave room later
    ],
)
def test_a_long_prompt_waits_until_it_fits_beside_what_runs(
    load: Load, tokens: int, figures: dict[str, int], goes: bool
) -> None:
    assert bool(dispatched(plan(load, entry("r", 70_000, tokens), kv_capacity_tokens=50_000, **figures))) is goes


@pytest.mark.parametrize(("context_tokens", "goes"), [(44_999, True), (45_000, False)])
def test_a_long_late_prompt_too_waits_until_it_fits(load: Load, context_tokens: int, goes: bool) -> None:
    figures = {"kv_capacity_tokens": 50_000, "context_tokens": context_tokens, "running_requests": 1}

    assert bool(dispatched(plan(load, deferred("late", -900, 5001), **figures))) is goes


def test_of_long_prompts_one_plan_dispatches_as_many_as_fit_together(load: Load) -> None:
    entries = [entry(f"r{number}", 60_000, 4000) for number in range(4)]
    figures = {"context_tokens": 2000, "running_requests": 1, "dispatch_window_tokens": 50_000}

    assert dispatched(plan(load, *entries, kv_capacity_tokens=10_000, **figures)) == ["r0", "r1"]
    assert len(dispatched(plan(load, *entries, kv_capacity_tokens=10_000, **figures, order=FIFO))) == 4


def test_what_comes_due_after_a_long_prompt_that_does_not_fit_waits_with_it(load: Load) -> None:
    entries = entry("long", 50_000, 9000), entry("short", 60_000, 10)
    figures = {"context_tokens": 9000, "running_requests": 1, "dispatched_tokens": 10}

    assert plan(load, *entries, kv_capacity_tokens=10_000, **figures) == []
    assert dispatched(plan(load, *reversed(entries), kv_capacity_tokens=10_000, **figures)) == ["short"]


@pytest.mark.parametrize("order", [FIFO, DEADLINE])
@pytest.mark.parametrize("state", InstanceState)
def test_only_an_instance_in_service_is_given_requests(load: Load, order: QueueOrder, state: InstanceState) -> None:
    serves = state in (InstanceState.READY, InstanceState.DRAINING)

    assert dispatched(plan(load, entry("r", 60_000, 1), order=order, state=state)) == (["r"] if serves else [])


def test_fifo_keeps_its_order_and_defers_nobody(load: Load) -> None:
    # given a request that is long past its deadline before one that is not; ranks are times of reservation
    entries = QueueEntry("first", NOW_MS - 90_000, 3000), QueueEntry("second", NOW_MS - 10, 10)

    assert plan(load, *entries, order=FIFO) == [PlanStep("first"), PlanStep("second")]


def test_by_deadline_the_longest_is_passed_over_and_waits(load: Load) -> None:
    entries = entry("long", 1000, 900), entry("one", 1100, 400), entry("two", 1200, 400)

    assert dispatched(plan(load, *entries, dispatch_window_tokens=800)) == ["one", "two"]


def test_a_plan_tells_what_it_passed_over_of_what_is_left(load: Load) -> None:
    # given room for one of two that can be on time beside each other, but not beside the long one
    entries = entry("long", 1000, 900), entry("one", 1100, 400), entry("two", 1500, 400)
    told = load("a", pending_tokens=1700, queued_requests=3, dispatch_window_tokens=1)

    made = plan_queue(head(told, *entries), DEADLINE)

    assert (made.steps, made.passed_over_tokens) == ((PlanStep("one"),), 900)
    assert plan_queue(head(told, *entries), FIFO).passed_over_tokens == 0


@pytest.mark.parametrize(("due_in_ms", "is_deferred"), [(40, False), (39, True)])
def test_a_request_that_would_be_late_even_if_it_were_next_is_deferred(
    load: Load, due_in_ms: int, is_deferred: bool
) -> None:
    steps = plan(load, entry("r", due_in_ms, 40))

    assert steps == [PlanStep("r", NOW_MS + due_in_ms + DEFERRED_RANK_MS) if is_deferred else PlanStep("r")]


@pytest.mark.parametrize(("due_in_ms", "is_deferred"), [(1064, False), (1063, True)])
def test_a_request_also_waits_for_the_rest_of_the_step_under_way(load: Load, due_in_ms: int, is_deferred: bool) -> None:
    # given half a step of 1024 tokens before its own 40
    steps = plan(load, entry("r", due_in_ms, 40), dispatched_tokens=4096)

    assert bool(steps) is is_deferred


def test_the_rest_of_the_step_under_way_counts_for_whom_the_plan_keeps_on_time(load: Load) -> None:
    # given two that would both be on time, were it not for the 100 tokens of half a step
    entries = entry("one", 1000, 900), entry("two", 1300, 400)

    assert dispatched(plan(load, *entries, dispatch_window_tokens=400)) == ["two"]
    assert dispatched(plan(load, *entries, dispatch_window_tokens=3)) == ["one"]


def test_deferred_work_has_no_part_in_the_step_under_way(load: Load) -> None:
    entries = entry("r", 40, 40), deferred("late", -900, 5000)

    assert dispatched(plan(load, *entries))[0] == "r"


def test_deferred_requests_go_in_their_order_when_nobody_on_time_waits(load: Load) -> None:
    steps = plan(load, deferred("one", -900, 3000), deferred("two", -800, 100))

    assert dispatched(steps) == ["one"], "the first has taken the idle engine"


@pytest.mark.parametrize(
    ("tokens", "together"),
    [
        (100, 21),  # 2,048 are a step, and half of the window of 4,096
        (1700, 2),
        (2047, 2),
        (2049, 1),
    ],
)
def test_late_requests_share_a_step_of_an_idle_engine_as_they_would_in_its_own_queue(
    load: Load, tokens: int, together: int
) -> None:
    steps = plan(load, *(deferred(f"late-{number}", number - 900, tokens) for number in range(60)))

    assert dispatched(steps) == [f"late-{number}" for number in range(together)]


def test_late_requests_never_fill_up_a_step_that_has_others(load: Load) -> None:
    assert plan(load, deferred("late", -900, 100), dispatched_tokens=1) == []


@pytest.mark.parametrize(
    ("figures", "goes"),
    [
        ({}, True),
        ({"dispatched_tokens": 1}, False),
        ({"context_tokens": 999_999}, True),
        ({"context_tokens": 1_000_000}, False),
        ({"running_requests": 256}, False),
    ],
)
def test_deferred_work_needs_an_idle_engine_and_kv_memory_that_is_left(
    load: Load, figures: dict[str, int], goes: bool
) -> None:
    assert bool(plan(load, deferred("late", -900, 4097), **figures)) is goes


def test_a_short_late_request_goes_before_a_long_one_where_decoding_fills_the_memory(load: Load) -> None:
    steps = plan(load, deferred("long", -900, 4097), deferred("short", -800, 4096), context_tokens=1_000_000)

    assert dispatched(steps) == ["short"]


@pytest.mark.parametrize(
    ("band", "gone"),
    [
        (0, []),
        (1, []),
        (FIRST_ABOVE, ["over"]),  # both are above their shares
        (class_band(1), []),
        (class_band(1) + FIRST_ABOVE, ["over"]),
    ],
)
def test_what_is_late_of_a_tenant_within_its_share_does_not_see_those_above_theirs_go_first(
    load: Load, band: int, gone: list[str]
) -> None:
    over = deferred("over", -900, 4096)._replace(band=band + FIRST_ABOVE)
    steps = plan(load, deferred("within", -800, 4097)._replace(band=band), over, context_tokens=1_000_000)

    assert dispatched(steps) == gone


@pytest.mark.parametrize(
    ("late", "on_time", "first"),
    [
        (0, FIRST_ABOVE, "late"),
        (1, FIRST_ABOVE, "late"),
        (0, 1, "on time"),  # both are within their shares
        (FIRST_ABOVE, FIRST_ABOVE + 1, "on time"),  # both are above theirs
        (class_band(1), class_band(1) + FIRST_ABOVE, "late"),
    ],
)
def test_what_is_late_of_a_tenant_within_its_share_goes_before_what_is_on_time_of_one_above_its_own(
    load: Load, late: int, on_time: int, first: str
) -> None:
    waiting = entry("on time", 60_000, 8192)._replace(band=on_time)

    assert dispatched(plan(load, waiting, deferred("late", -900, 8192)._replace(band=late))) == [first]


def test_what_is_late_and_finds_no_memory_keeps_what_is_on_time_of_a_tenant_above_its_share_back(load: Load) -> None:
    long = deferred("long", -900, 20_001)
    above = [entry("above", 60_000, 100)._replace(band=FIRST_ABOVE)]

    assert plan(load, *above, long, context_tokens=190_000, kv_capacity_tokens=200_000, running_requests=9) == []


def test_what_is_late_and_finds_no_memory_keeps_nothing_else_back(load: Load) -> None:
    memory = {"context_tokens": 190_000, "kv_capacity_tokens": 200_000, "running_requests": 9}
    long, above = deferred("long", -900, 20_001), entry("above", 60_000, 100)._replace(band=FIRST_ABOVE)

    short = deferred("short", -800, 100)
    assert dispatched(plan(load, above, long, short, **memory)) == ["short"]


def test_what_is_late_goes_before_those_above_their_shares_while_no_deadline_is_at_stake(load: Load) -> None:
    filling = QueueOrder(True, 30.0, fills_from=class_band(2))
    late, above = deferred("late", -900, 100), entry("above", 60_000, 100)._replace(band=FIRST_ABOVE)

    assert dispatched(plan(load, above, late, order=filling, dispatched_tokens=4096)) == []
    assert dispatched(plan(load, above, order=filling, dispatched_tokens=4096)) == ["above"]


def test_late_work_does_not_go_before_on_time_work_that_a_plan_cannot_see(load: Load) -> None:
    newly_late = [entry(f"r{number}", 0, 100)._replace(band=FIRST_ABOVE) for number in range(PLAN_LIMIT)]
    late = deferred("late", -900, 100)._replace(band=FIRST_ABOVE)

    assert dispatched(plan(load, *newly_late, late)) == []
    assert dispatched(plan(load, *newly_late[1:], late)) == ["late"]


LOWER = class_band(1)


def lower(entry: QueueEntry, level: int = 0) -> QueueEntry:
    """The same of a lower class."""
    return entry._replace(request_id=f"lower {entry.request_id}", band=LOWER + level)


@pytest.mark.parametrize("level", [0, FIRST_ABOVE])
def test_a_class_goes_first_late_or_on_time(load: Load, level: int) -> None:
    """Of each class those on time go before late ones, and all of a higher one before any of a lower one."""
    queue = [
        entry("on time", 60_000, 4096)._replace(band=level),
        lower(entry("on time", 2000, 100)),
        deferred("late", -2000, 4096)._replace(band=level),
        lower(deferred("late", -90_000, 100)),
    ]
    order = []
    while queue:
        (gone,) = dispatched(plan(load, *queue, dispatch_window_tokens=1))
        order.append(gone)
        queue = [each for each in queue if each.request_id != gone]

    assert order == ["on time", "late", "lower on time", "lower late"]


def test_a_late_request_goes_before_more_of_a_lower_class_than_a_plan_can_see(load: Load) -> None:
    many = [lower(entry(f"{number:02}", 4000 + number, 100)) for number in range(PLAN_LIMIT)]

    assert dispatched(plan(load, *many, deferred("late", -2000, 4096))) == ["late"]


def test_what_is_late_of_a_lower_class_does_not_share_a_step_while_others_of_it_are_on_time(load: Load) -> None:
    queue = lower(entry("on time", 60_000, 100)), deferred("late", -2000, 100), lower(deferred("late", -900, 100))

    assert dispatched(plan(load, *queue)) == ["late"]


@pytest.mark.parametrize("memory", [{"context_tokens": 1_000_000}, {"dispatched_tokens": 1}])
def test_nothing_of_a_lower_class_goes_while_a_late_request_waits_for_the_engine(
    load: Load, memory: dict[str, int]
) -> None:
    late = deferred("late", -2000, 4097)

    assert plan(load, lower(entry("on time", 60_000, 100)), late, **memory) == []
    assert plan(load, late, lower(deferred("late", -900, 100)), **memory) == []


def test_what_a_plan_defers_keeps_lower_classes_back_until_the_next(load: Load) -> None:
    queue = entry("late", 10, 100), lower(entry("on time", 60_000, 100))

    assert plan(load, *queue) == [PlanStep("late", NOW_MS + 10 + DEFERRED_RANK_MS)]


def test_what_is_passed_over_of_a_higher_class_goes_before_what_a_lower_one_could_have_on_time(load: Load) -> None:
    """Those of the higher class cannot both be on time, and the lower one could beside either."""
    queue = [entry("one", 2000, 1500), entry("two", 2000, 1400), lower(entry("on time", 1900, 100))]

    assert dispatched(plan(load, *queue, dispatch_window_tokens=1)) == ["two"]
    assert dispatched(plan(load, queue[0], queue[2], dispatch_window_tokens=1)) == ["one"]


def test_a_lower_class_is_planned_behind_all_that_waits_of_higher_ones() -> None:
    queue = entry("one", 4000, 1000), lower(entry("on time", 4500, 1000)), lower(entry("behind", 4600, 2000))
    late = [deferred("late", -900, 1000)]

    assert plan_by_class(queue, NOW_MS, 0, TOKENS_PER_S).passed_over == frozenset()
    assert plan_by_class(queue, NOW_MS, 0, TOKENS_PER_S, late).passed_over == {"lower behind"}
    assert plan_by_class(queue[:1], NOW_MS, 0, TOKENS_PER_S, late).passed_over == frozenset()
    assert plan_by_class((), NOW_MS, 0, TOKENS_PER_S, late) == OnTimePlan(0, 0)


def test_while_no_deadline_is_at_stake_a_higher_class_still_goes_first(load: Load) -> None:
    queue = lower(entry("soon", 60_000, 100)), entry("later", 90_000, 100)

    assert dispatched(plan(load, *queue, dispatched_tokens=4096))[0] == "later"


@given(
    st.lists(
        st.tuples(st.integers(-500, 9000), st.integers(1, 6000), st.booleans(), st.integers(0, 2), st.integers(0, 3)),
        max_size=12,
    ),
    st.integers(0, 6000),
    st.floats(0, 1.5),
)
def test_whatever_waits_no_plan_sees_a_lower_class_go_before_a_higher_one(
    load: Load, made: list[tuple[int, int, bool, int, int]], on_engine: int, kv_share: float
) -> None:
    entries = sorted(
        (
            (deferred if late else entry)(f"r{number}", due, tokens)._replace(band=class_band(rank) + level)
            for number, (due, tokens, late, rank, level) in enumerate(made)
        ),
        key=lambda each: each.place,
    )
    running = {"running_requests": 1, "context_tokens": int(kv_share * 50_000), "kv_capacity_tokens": 50_000}

    steps = plan(load, *entries, dispatched_tokens=on_engine, **running)

    gone = dispatched(steps)
    ranks = {each.request_id: each.band // class_band(1) for each in entries}
    held = [rank for name, rank in ranks.items() if name not in gone]
    assert [ranks[name] for name in gone] == sorted(ranks[name] for name in gone)
    assert not gone or all(rank >= ranks[gone[-1]] for rank in held)


def test_what_becomes_late_in_a_plan_keeps_those_above_their_shares_back_until_the_next(load: Load) -> None:
    over = deferred("over", -900, 100)._replace(band=FIRST_ABOVE)
    within = entry("within", 10, 100)

    assert plan(load, within, over) == [PlanStep("within", NOW_MS + 10 + DEFERRED_RANK_MS)]
    assert dispatched(plan(load, deferred("within", 10, 100), over)) == ["within", "over"]


def test_deferred_work_waits_behind_all_that_are_on_time(load: Load) -> None:
    entries = entry("r", 60_000, 100), deferred("late", -900, 100)

    assert dispatched(plan(load, *entries)) == ["r"]


def test_a_request_that_is_deferred_goes_in_the_next_plan_at_the_earliest(load: Load) -> None:
    steps = plan(load, entry("late", 10, 100))

    assert steps == [PlanStep("late", NOW_MS + 10 + DEFERRED_RANK_MS)]


@pytest.mark.parametrize(("waited_s", "over"), [(6.9, False), (7.0, True)])
def test_a_deferred_request_gives_up_so_long_after_its_deadline(waited_s: float, over: bool) -> None:
    order = QueueOrder(by_deadline=True, max_deferred_s=2.0)
    deferred = StoredRequest(
        "r",
        "one",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=100,
        expected_output_tokens=10,
        slo_ms=5000,
        deferred=True,
    )

    assert order.gives_up(deferred, waited_s) is over
    assert not order.gives_up(replace(deferred, deferred=False), waited_s)


def test_requests_that_were_held_first_come_first_served_have_deadlines_in_the_order_that_follows() -> None:
    """The order of a running fleet was changed: nothing that is held is overdue by that."""
    settings = SchedulingSettings(queue_order="fifo", slo_ttft_s=5.0)
    held = StoredRequest(
        "r",
        "one",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=100,
        expected_output_tokens=10,
        slo_ms=5000,
        enqueued_ms=NOW_MS,
    )
    by_deadline = queue_order_of(settings.model_copy(update={"queue_order": "deadline"}))

    assert queue_order_of(settings).rank_of(held) == by_deadline.rank_of(held) == NOW_MS + 5000


@given(
    st.lists(st.tuples(st.integers(-500, 9000), st.integers(1, 3000), st.booleans()), max_size=12),
    st.integers(0, 6000),
    st.integers(0, 8),
    st.floats(0, 1.5),
)
@example(made=[(4097, 1, False)], on_engine=4096, running=0, kv_share=0.0)  # no deadline at stake: more than a window
def test_whatever_waits_a_plan_holds_its_promises(
    load: Load, made: list[tuple[int, int, bool]], on_engine: int, running: int, kv_share: float
) -> None:
    entries = sorted(
        ((deferred if late else entry)(f"r{number}", due, tokens) for number, (due, tokens, late) in enumerate(made)),
        key=lambda each: each.rank_ms,
    )
    figures = {"max_running_requests": 8, "running_requests": running, "context_tokens": int(kv_share * 1_000_000)}
    steps = plan(load, *entries, dispatched_tokens=on_engine, **figures)
    by_id, gone = {each.request_id: each for each in entries}, dispatched(steps)

    # then no request is named twice, and only those not yet deferred are deferred
    assert len({step.request_id for step in steps}) == len(steps)
    assert not any(by_id[step.request_id].deferred for step in steps if step.deferred_to_ms is not None)
    # then the window and the instance's places hold: the last one dispatched still found room
    assert len(gone) <= max(0, 8 - running)
    before_last = on_engine + sum(by_id[name].uncached_tokens for name in gone[:-1])
    all_tokens, rate = on_engine + sum(each.uncached_tokens for each in entries), load("a").prefill_tokens_per_s
    in_time = not any(each.deferred for each in entries) and all(step.deferred_to_ms is None for step in steps)
    calm = bool(gone) and in_time and is_calm(all_tokens, rate, NOW_MS, by_id[gone[-1]].rank_ms)
    assert not gone or before_last < (CALM_WINDOWS if calm else 1) * 4096
    # then deferred ones go without others, to an idle engine, with no request on time left, in one step or alone
    if any(by_id[name].deferred for name in gone):
        left = [each for each in entries if not each.deferred and each.request_id not in {s.request_id for s in steps}]
        assert (on_engine, left) == (0, []) and all(by_id[name].deferred for name in gone)
        assert len(gone) == 1 or (before_last < 2048 and sum(by_id[name].uncached_tokens for name in gone) <= 4096)
        assert kv_share < 1.0 or by_id[gone[0]].uncached_tokens <= 4096


@pytest.mark.parametrize(("order", "rank_ms"), [(FIFO, 1000), (DEADLINE, 6000)])
def test_a_request_is_listed_by_its_order_and_behind_every_deadline_once_deferred(
    order: QueueOrder, rank_ms: int
) -> None:
    figures = {"slo_ms": 5000, "enqueued_ms": 1000}
    request = StoredRequest(
        "r",
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=900,
        expected_output_tokens=256,
        **figures,
    )
    late = StoredRequest(
        "r",
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=900,
        expected_output_tokens=256,
        **figures,
        deferred=True,
    )

    assert (order.rank_of(request), order.rank_of(late)) == (rank_ms, rank_ms + DEFERRED_RANK_MS)


def test_the_order_is_the_settings() -> None:
    assert queue_order_of(SchedulingSettings(policy="dualmap", max_deferred_s=7.0)) == QueueOrder(False, 7.0, 5000)


def test_by_default_a_late_request_waits_as_long_as_any_may_be_held() -> None:
    order, settings = queue_order_of(SchedulingSettings()), SchedulingSettings()
    late = StoredRequest(
        "r",
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=100,
        prompt_tokens=100,
        expected_output_tokens=256,
        slo_ms=5000,
        deferred=True,
    )

    assert not order.gives_up(late, settings.max_hold_s)
    assert queue_order_of(SchedulingSettings()).by_deadline
