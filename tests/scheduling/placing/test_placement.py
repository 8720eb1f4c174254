"""The search for an instance, driven by hand: each step is answered by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.placing.decision import Policy, Reason, RouteQuery
from dualmap.scheduling.placing.options import Weighing
from dualmap.scheduling.placing.placement import (
    CHECKED_ROUNDS,
    MAX_ROUNDS,
    Chosen,
    Observation,
    Placement,
    PlaceReply,
    PlaceStatus,
    Queueing,
    Search,
    SearchCourse,
    SearchFailed,
    SearchRules,
)
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState, Role
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.view import ClusterView
from dualmap.scheduling.steps import drive_now

Load = Callable[..., InstanceLoad]
Answer = Callable[[Placement], PlaceReply]
IDS = tuple(f"i{number}" for number in range(8))
S = PlaceStatus


@dataclass
class HandFleet:
    """Answers every placement with the next of ``answers``, the last one for ever."""

    view: ClusterView
    answers: list[Answer] = field(default_factory=list)
    learned: Learned = field(default_factory=Learned)
    behind_breakers: frozenset[str] = frozenset()
    loads: dict[str, InstanceLoad] = field(default_factory=dict)
    placements: list[Placement] = field(default_factory=list)
    observed: list[tuple[str, ...]] = field(default_factory=list)
    refreshes: int = 0
    new_view: ClusterView | None = None
    """The view that a refresh finds."""

    @property
    def sight(self) -> Self:
        return self

    def blocked(self) -> frozenset[str]:
        return self.behind_breakers

    async def place(self, placement: Placement) -> PlaceReply:
        self.placements.append(placement)
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])(placement)

    async def observe(self, instance_ids: Iterable[str], chain: Chain) -> Observation:
        self.observed.append(tuple(instance_ids))
        loads = {name: self.loads[name] for name in self.observed[-1]}
        return Observation(1, 1, loads, sequence=len(self.observed))

    async def refresh(self) -> None:
        self.refreshes += 1
        self.view = self.new_view or self.view

    @property
    def named(self) -> list[tuple[str, ...]]:
        return [placement.weighing.instances for placement in self.placements]


def answer(status: PlaceStatus, place: int | None = 0, other: int | None = None, **reply: Any) -> Answer:
    """A reply that takes those places of the named instances."""

    def build(placement: Placement) -> PlaceReply:
        ready = {name: InstanceLoad(name, InstanceState.READY) for name in placement.weighing.instances}
        loads = reply.pop("loads", None) or ready
        named = placement.weighing.instances
        instance_id = reply.pop("instance_id", None) or (None if place is None else named[place])
        other_id = None if other is None else named[other]
        found = {each.name: reply.pop(each.name) for each in fields(Chosen) if each.name in reply}
        hits = {name: load.hit_blocks for name, load in loads.items()}
        seen = Observation(1, 1, loads, 1_000_000, hits)
        return PlaceReply(status, seen, Chosen(instance_id, other_id, **found), **reply)

    return build


NOT_READY = answer(S.NOT_READY, None)


@pytest.fixture
def search(policy: Callable[..., Policy], query: Callable[..., RouteQuery]) -> Callable[..., Search]:
    def build(fleet: HandFleet, name: str = "dualmap-least-cost", **changes: Any) -> Search:
        asked = query()
        request = StoredRequest(
            "r",
            "one",
            "",
            RequestState.HELD,
            1,
            uncached_tokens=0,
            prompt_tokens=asked.chain.prompt_tokens,
            expected_output_tokens=50,
            slo_ms=5000,
        )
        return Search(SearchRules(policy(name), QueueOrder(True, 30.0), fleet, 3.0), asked, request, **changes)

    return build


@pytest.fixture
def fleet(view: Callable[..., ClusterView]) -> HandFleet:
    return HandFleet(view(IDS))


@pytest.fixture
def pair(fleet: HandFleet, policy: Callable[..., Policy], query: Callable[..., RouteQuery]) -> tuple[str, ...]:
    """The candidates of the request."""
    return policy("dualmap").candidates(query(), fleet.view)


def failed(search: Search, fleet: HandFleet) -> SearchFailed:
    with pytest.raises(SearchFailed) as failure:
        drive_now(search.run(), fleet)
    return failure.value


Build = Callable[..., Search]


# one step ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [S.DISPATCHED, S.HELD])
def test_one_step_is_enough_where_the_store_takes_the_request(
    search: Build, fleet: HandFleet, pair: tuple[str, ...], status: PlaceStatus
) -> None:
    fleet.answers = [answer(status, 1, 0, uncached_tokens=700)]
    made = search(fleet)

    course: SearchCourse = drive_now(made.run(), fleet)

    placed = course.placed
    assert (course.trips, fleet.refreshes, course.rounds) == (1, 0, (placed,))
    assert (placed.decision.instance_id, placed.decision.alternative_id) == (pair[1], pair[0])
    assert (placed.reply.chosen.uncached_tokens, placed.candidates) == (700, pair)


def test_the_store_is_asked_for_the_pair_by_the_policys_weights(
    search: Build, fleet: HandFleet, pair: tuple[str, ...], policy: Callable[..., Policy], query: Any
) -> None:
    fleet.answers = [answer(S.DISPATCHED)]
    made = search(fleet, "dualmap", refuses=True)

    drive_now(made.run(), fleet)

    assert fleet.placements == [
        Placement(
            made.request,
            made.query.chain,
            Weighing(Leg.WHOLE, pair, policy("dualmap").weights(query(), fleet.learned), roles=(Role.MIXED,)),
            queueing=Queueing(5000, defers=True, refuses=True, rebalances=True),
        )
    ]


@pytest.mark.parametrize("was_admitted", [False, True])
def test_a_request_that_its_budgets_have_let_in_draws_whatever_is_left_of_them(
    search: Build, fleet: HandFleet, was_admitted: bool
) -> None:
    fleet.answers = [answer(S.DISPATCHED)]

    drive_now(search(fleet, was_admitted=was_admitted).run(), fleet)

    assert [each.must_draw for each in fleet.placements] == [was_admitted]


@pytest.mark.parametrize(("hot", "hot_tokens"), [({}, 0), ({1: 1}, 0), ({1: 1, 2: 2}, 200)])
def test_the_store_is_told_of_a_hot_prefix(
    search: Build, view: Callable[..., ClusterView], hot: dict[int, int], hot_tokens: int
) -> None:
    fleet = HandFleet(view(IDS, hot))
    fleet.answers = [answer(S.DISPATCHED)]

    drive_now(search(fleet).run(), fleet)

    assert fleet.placements[0].hot_tokens == hot_tokens


def test_what_was_expected_is_told_with_the_decision(search: Build, fleet: HandFleet, load: Load, pair: Any) -> None:
    loads = {
        pair[0]: load(pair[0], pending_tokens=2000, hit_blocks=4, deferred_tokens=500),
        pair[1]: load(pair[1], hit_blocks=1),
    }
    fleet.answers = [answer(S.HELD, 0, 1, loads=loads, ttft_s=2.1)]
    made = search(fleet, "dualmap")

    placed = drive_now(made.run(), fleet).placed

    decision, features = placed.decision, placed.features(made.query.chain, made.rules.decode_stall_s)
    assert (decision.hit_blocks, decision.uncached_tokens, decision.alternative_uncached_tokens) == (4, 600, 900)
    assert decision.expected_ttft_s == 2.1
    assert (features.ahead_s, features.overtaken_s, features.compute_s) == (1.5, 0.5, 0.6)
    assert decision.reason is Reason.CACHE


def test_no_time_below_nothing_is_expected_whatever_was_learned(search: Build, fleet: HandFleet) -> None:
    fleet.answers = [answer(S.DISPATCHED, ttft_s=-4.9)]

    assert drive_now(search(fleet).run(), fleet).placed.decision.expected_ttft_s == 0.0


def test_alone_is_a_reason(search: Build, fleet: HandFleet) -> None:
    fleet.answers = [answer(S.DISPATCHED)]

    assert drive_now(search(fleet).run(), fleet).placed.decision.reason is Reason.ONLY_ONE


# beyond the pair -----------------------------------------------------------------------------------------------
def test_the_store_may_look_beyond_the_pair_where_the_policy_does(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    fleet.answers = [answer(S.DISPATCHED)]

    drive_now(search(fleet).run(), fleet)

    (placement,) = fleet.placements
    assert (placement.weighing.instances, placement.excluded) == (pair, frozenset())
    assert placement.weighing.beyond_from_s is not None


def test_what_the_store_found_beyond_the_pair_is_said_to_be_there(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    beyond = next(name for name in IDS if name not in pair)
    loads = {name: InstanceLoad(name, InstanceState.READY) for name in (*pair, beyond)}
    fleet.answers = [answer(S.HELD, None, 0, loads=loads, instance_id=beyond)]

    course: SearchCourse = drive_now(search(fleet).run(), fleet)

    placed = course.placed
    assert (placed.decision.instance_id, placed.decision.reason) == (beyond, Reason.BEYOND_PAIR)
    assert (placed.candidates, course.trips) == (pair, 1)


def test_a_request_that_failed_on_its_whole_pair_is_told_to_be_beyond_it(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    fleet.answers = [answer(S.DISPATCHED, 0, 1)]
    made = search(fleet, "dualmap")

    placed = drive_now(replace(made, query=replace(made.query, excluded=frozenset(pair))).run(), fleet).placed

    assert set(fleet.named[0]).isdisjoint(pair)
    assert placed.decision.reason is Reason.BEYOND_PAIR


def test_excluded_and_blocked_instances_are_not_weighed(search: Build, fleet: HandFleet, pair: Any) -> None:
    broken, failed_on = [name for name in IDS if name not in pair][:2]
    fleet.behind_breakers, fleet.answers = frozenset({broken}), [answer(S.DISPATCHED)]
    made = search(fleet)

    drive_now(replace(made, query=replace(made.query, excluded=frozenset({failed_on}))).run(), fleet)

    (placement,) = fleet.placements
    assert placement.excluded == {broken, failed_on}


def test_a_policy_that_does_not_look_beyond_names_its_pair_alone(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    fleet.answers = [answer(S.DISPATCHED)]

    drive_now(search(fleet, "dualmap").run(), fleet)

    (placement,) = fleet.placements
    assert (placement.weighing.instances, placement.weighing.beyond_from_s) == (pair, None)


# what does not hold --------------------------------------------------------------------------------------------
def test_a_pair_that_takes_no_requests_is_looked_at_afresh_and_given_up(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    fleet.answers = [NOT_READY, answer(S.DISPATCHED)]

    placed = drive_now(search(fleet, "dualmap").run(), fleet).placed

    assert fleet.refreshes == 1
    assert set(fleet.named[1]).isdisjoint(pair)
    assert placed.decision.reason is Reason.ONLY_ONE


def test_where_nothing_is_ready_members_are_read_once_more_before_it_is_given_up(
    search: Build, fleet: HandFleet, view: Callable[..., ClusterView]
) -> None:
    fleet.view, fleet.new_view = view([]), view(["late"])
    fleet.answers = [answer(S.DISPATCHED)]

    placed = drive_now(search(fleet).run(), fleet).placed

    assert (placed.decision.instance_id, fleet.refreshes) == ("late", 1)


def test_a_fleet_without_instances_fails_the_search(search: Build, view: Callable[..., ClusterView]) -> None:
    fleet = HandFleet(view([]))

    error = failed(search(fleet), fleet)

    assert (error.full, error.missed, error.duplicate, fleet.placements) == (frozenset(), None, False, [])


def test_instances_that_took_no_requests_are_tried_again_where_no_other_is_left(
    search: Build, view: Callable[..., ClusterView]
) -> None:
    fleet = HandFleet(view(["a", "b"]), [NOT_READY, answer(S.DISPATCHED)])

    placed = drive_now(search(fleet, "dualmap").run(), fleet).placed

    assert placed.decision.instance_id in ("a", "b")
    assert fleet.refreshes == 2


def test_a_store_that_never_finds_one_ready_is_not_asked_for_ever(search: Build, fleet: HandFleet) -> None:
    fleet.answers = [NOT_READY]

    failed(search(fleet), fleet)

    assert len(fleet.placements) <= MAX_ROUNDS


def test_full_queues_are_passed_over_until_all_are_full(search: Build, fleet: HandFleet, pair: tuple[str, ...]) -> None:
    fleet.answers = [answer(S.QUEUE_FULL)]
    made = search(fleet, "dualmap")

    error = failed(made, fleet)

    assert error.full == frozenset(IDS)
    assert (fleet.named[0], fleet.named[1]) == (pair, (pair[1],))


def test_a_large_fleet_of_full_queues_is_not_asked_to_its_end(search: Build, view: Callable[..., ClusterView]) -> None:
    fleet = HandFleet(view(f"i{number}" for number in range(2 * MAX_ROUNDS)), [answer(S.QUEUE_FULL)])

    assert len(failed(search(fleet, "dualmap"), fleet).full) == len(fleet.placements) == MAX_ROUNDS


def test_after_a_full_queue_another_instance_is_taken(search: Build, fleet: HandFleet, pair: tuple[str, ...]) -> None:
    fleet.answers = [answer(S.QUEUE_FULL), answer(S.HELD)]

    course: SearchCourse = drive_now(search(fleet, "dualmap").run(), fleet)

    assert course.placed.decision.instance_id == pair[1]
    assert [each.reply.status for each in course.rounds] == [S.QUEUE_FULL, S.HELD]


def busy(load: Load) -> dict[str, InstanceLoad]:
    return {name: load(name, pending_tokens=1) for name in IDS}


def test_an_expected_miss_is_told_with_where_it_would_have_gone(
    search: Build, fleet: HandFleet, pair: tuple[str, ...], load: Load
) -> None:
    fleet.answers = [answer(S.MISSED, 1, loads=busy(load))]

    error = failed(search(fleet, refuses=True), fleet)

    assert error.missed is not None
    assert error.missed.decision.instance_id == pair[1]
    assert len(fleet.placements) == 1


@pytest.mark.parametrize("name", ["dualmap-least-cost", "dualmap", "least-loaded"])
def test_an_idle_instance_refuses_nothing_that_its_prior_would_serve_in_time(
    search: Build, fleet: HandFleet, load: Load, name: str
) -> None:
    fleet.loads = {each: load(each, prefill_tokens_per_s=10.0) for each in IDS}
    fleet.answers = [answer(S.MISSED, loads=fleet.loads), answer(S.DISPATCHED, loads=fleet.loads)]

    placed = drive_now(search(fleet, name, refuses=True).run(), fleet).placed

    assert placed.reply.status is S.DISPATCHED
    assert [(each.queueing.refuses, each.max_pending_tokens == 0) for each in fleet.placements] == [
        (True, False),
        (False, True),
    ]


def test_what_the_prior_would_not_serve_in_time_is_refused(search: Build, fleet: HandFleet, load: Load) -> None:
    fleet.answers = [answer(S.MISSED, loads={name: load(name, prefill_tokens_per_s=10.0) for name in IDS})]
    made = search(fleet, refuses=True)

    assert failed(replace(made, query=replace(made.query, slo_s=0.05)), fleet).missed is not None
    assert len(fleet.placements) == 1


def test_an_instance_whose_kv_memory_is_full_is_not_idle(search: Build, fleet: HandFleet, load: Load) -> None:
    full = {name: load(name, prefill_tokens_per_s=10.0, context_tokens=1_000_000) for name in IDS}
    fleet.answers = [answer(S.MISSED, loads=full)]

    assert failed(search(fleet, refuses=True), fleet).missed is not None


def test_an_idle_instance_that_was_given_work_meanwhile_refuses_again(
    search: Build, fleet: HandFleet, load: Load
) -> None:
    idle = {name: load(name, prefill_tokens_per_s=10.0) for name in IDS}
    fleet.answers = [
        answer(S.MISSED, loads=idle),
        answer(S.STALE, loads=busy(load)),
        answer(S.MISSED, loads=busy(load)),
    ]

    assert failed(search(fleet, refuses=True), fleet).missed is not None
    assert [placement.queueing.refuses for placement in fleet.placements] == [True, False, True]


@pytest.mark.parametrize("name", ["dualmap", "min-ttft"])
def test_another_live_request_of_the_id_ends_the_search(search: Build, fleet: HandFleet, load: Load, name: str) -> None:
    fleet.loads = {each: load(each) for each in IDS}
    fleet.answers = [answer(S.DUPLICATE, None)]

    assert failed(search(fleet, name), fleet).duplicate
    assert len(fleet.placements) == 1


# breakers ------------------------------------------------------------------------------------------------------
def test_instances_behind_open_breakers_are_passed_over(search: Build, fleet: HandFleet, pair: tuple[str, ...]) -> None:
    fleet.behind_breakers, fleet.answers = frozenset({pair[0]}), [answer(S.DISPATCHED)]

    drive_now(search(fleet, "dualmap").run(), fleet)

    assert fleet.named == [(pair[1],)]


def test_a_pair_behind_open_breakers_is_left_for_others(search: Build, fleet: HandFleet, pair: Any) -> None:
    fleet.behind_breakers, fleet.answers = frozenset(pair), [answer(S.DISPATCHED, 0, 1)]

    placed = drive_now(search(fleet, "dualmap").run(), fleet).placed

    assert set(fleet.named[0]).isdisjoint(pair)
    assert placed.decision.reason is Reason.BEYOND_PAIR


def test_where_all_breakers_are_open_they_are_trusted_once_more(
    search: Build, fleet: HandFleet, pair: tuple[str, ...]
) -> None:
    fleet.behind_breakers, fleet.answers = frozenset(IDS), [answer(S.DISPATCHED)]

    drive_now(search(fleet, "dualmap").run(), fleet)

    assert (fleet.refreshes, fleet.named) == (1, [pair])


# policies that choose ------------------------------------------------------------------------------------------
def test_a_policy_that_chooses_observes_and_then_reserves_what_it_chose(
    search: Build, fleet: HandFleet, load: Load
) -> None:
    fleet.loads = {name: load(name, pending_tokens=100 * number) for number, name in enumerate(IDS, 1)}
    fleet.answers = [answer(S.DISPATCHED)]

    course: SearchCourse = drive_now(search(fleet, "least-loaded").run(), fleet)

    placed = course.placed
    window_tokens = fleet.view.instances["i0"].dispatch_window_tokens
    assert (course.trips, fleet.observed, fleet.named) == (2, [IDS], [("i0",)])
    assert fleet.placements[0].max_pending_tokens == 100 + window_tokens
    assert (placed.decision.alternative_id, placed.reply.chosen.alternative_id) == ("i1", "i1")
    assert placed.reply.seen.loads == fleet.loads


def test_a_stale_choice_is_made_again_and_at_last_taken_as_it_is(search: Build, fleet: HandFleet, load: Load) -> None:
    fleet.loads = {name: load(name) for name in IDS}
    fleet.answers = [*[answer(S.STALE)] * CHECKED_ROUNDS, answer(S.HELD)]
    made = search(fleet, "least-loaded")

    course: SearchCourse = drive_now(made.run(), fleet)

    checked = [placement.max_pending_tokens is not None for placement in fleet.placements]
    assert checked == [True] * CHECKED_ROUNDS + [False]
    assert len(fleet.observed) == len(course.rounds) == CHECKED_ROUNDS + 1


def test_round_robin_relies_on_no_load_and_counts_with_the_observations(
    search: Build, fleet: HandFleet, load: Load
) -> None:
    fleet.loads = {name: load(name) for name in IDS}
    fleet.answers = [answer(S.DISPATCHED)]

    drive_now(search(fleet, "round-robin").run(), fleet)

    assert (fleet.named, fleet.placements[0].max_pending_tokens) == ([("i1",)], None)


def test_a_choice_that_left_meanwhile_is_excluded_from_the_next(search: Build, fleet: HandFleet, load: Load) -> None:
    fleet.loads = {name: load(name, pending_tokens=number) for number, name in enumerate(IDS)}
    fleet.answers = [NOT_READY, answer(S.DISPATCHED)]

    placed = drive_now(search(fleet, "least-loaded").run(), fleet).placed

    assert (fleet.refreshes, fleet.named, placed.decision.instance_id) == (1, [("i0",), ("i1",)], "i1")


def test_where_no_observed_instance_is_ready_members_are_read_again(
    search: Build, fleet: HandFleet, load: Load
) -> None:
    fleet.loads = {name: load(name, state=InstanceState.DOWN) for name in IDS}

    failed(search(fleet, "least-loaded"), fleet)

    assert fleet.refreshes == 1
    assert fleet.placements == []
