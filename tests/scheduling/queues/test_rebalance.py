from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dualmap.scheduling.estimates.ttft import expected_ttft_s
from dualmap.scheduling.queues.rebalance import HotQueue, Move, plan_rebalance, plan_sweep, waited_s
from dualmap.scheduling.state.instance import InstanceLoad, InstanceState
from dualmap.scheduling.state.request import RequestState, StoredRequest

RATE = 1000.0
NOW_MS = 1_000_000


def load(instance_id: str, *, dispatched: int = 0, pending: int = 0, stalled_s: float = 0.0) -> InstanceLoad:
    return InstanceLoad(
        instance_id,
        InstanceState.READY,
        pending_tokens=pending,
        dispatched_tokens=dispatched,
        prefill_tokens_per_s=RATE,
        stalled_s=stalled_s,
    )


def held(
    name: str,
    tokens: int,
    *,
    other: str | None = "b",
    other_tokens: int | None = None,
    waited_s: float = 0.0,
    slo_s: float = 5.0,
) -> StoredRequest:
    there = tokens if other_tokens is None else other_tokens
    return StoredRequest(
        name,
        "replica",
        "a",
        RequestState.HELD,
        1,
        uncached_tokens=tokens,
        prompt_tokens=max(tokens, there),
        expected_output_tokens=256,
        slo_ms=round(slo_s * 1000),
        enqueued_ms=NOW_MS - round(waited_s * 1000),
        alternative_id=other,
        alternative_uncached_tokens=there,
    )


def hot(
    *requests: StoredRequest, dispatched: int = 0, others: tuple[InstanceLoad, ...] = (), stalled_s: float = 0.0
) -> HotQueue:
    pending = dispatched + sum(request.uncached_tokens for request in requests)
    return HotQueue(
        NOW_MS,
        load("a", dispatched=dispatched, pending=pending, stalled_s=stalled_s),
        requests,
        {other.instance_id: other for other in others},
    )


def test_nothing_moves_while_everyone_is_on_time() -> None:
    queue = hot(held("r1", 2000), held("r2", 2000), dispatched=1000, others=(load("b"),))

    assert plan_rebalance(queue) == ()


def test_the_largest_benefit_moves_first_and_the_rest_stays_once_it_is_on_time() -> None:
    # given 4, 5 and 6 s of expected TTFT against an SLO of 5 s
    queue = hot(held("r1", 1000), held("r2", 1000), held("r3", 1000), dispatched=3000, others=(load("b"),))

    # when the last has gone, everybody left is on time
    assert plan_rebalance(queue) == (Move("r3", "b", 5.0),)


def test_a_request_is_eligible_only_if_it_gains_and_would_be_on_time_there() -> None:
    late_there = held("r1", 3000, other="late")
    no_gain = held("r2", 3000, other="loaded")
    eligible = held("r3", 3000, other="idle")
    queue = hot(
        late_there,
        no_gain,
        eligible,
        dispatched=500,
        others=(load("late", pending=2000), load("loaded", pending=6000), load("idle", pending=1000)),
    )

    assert [move.request_id for move in plan_rebalance(queue)] == ["r3"]


def test_tokens_already_moved_to_a_target_count_against_the_next_move() -> None:
    # given three requests of 2 s each behind 6 s of work, and one idle target that has room for two within 5 s
    queue = hot(held("r1", 2000), held("r2", 2000), held("r3", 2000), dispatched=6000, others=(load("b"),))

    moves = plan_rebalance(queue)

    assert len(moves) == 2
    assert [round(move.benefit_s) for move in moves] == [10, 6]


def test_time_already_waited_is_spent_from_the_slo_on_both_sides() -> None:
    # given a request that would take 3 s on the target, with 2.5 s of its SLO left
    queue = hot(held("r1", 3000, waited_s=2.5), dispatched=9000, others=(load("b"),))

    assert plan_rebalance(queue) == ()


def test_a_request_that_would_take_all_of_its_slo_there_stays() -> None:
    assert plan_rebalance(hot(held("r1", 5000), dispatched=9000, others=(load("b"),))) == ()
    assert plan_rebalance(hot(held("r1", 4999), dispatched=9000, others=(load("b"),))) == (Move("r1", "b", 9.0),)


def test_a_decode_bottleneck_makes_queued_requests_late_and_movable() -> None:
    stalled = hot(held("r1", 2000), others=(load("b"),), stalled_s=3.5)
    not_long_enough = hot(held("r1", 2000), others=(load("b"),), stalled_s=2.9)

    assert plan_rebalance(stalled) == (Move("r1", "b", 3.5),)
    assert plan_rebalance(not_long_enough) == ()


def test_a_target_with_a_decode_bottleneck_takes_nobody_who_would_be_late_there() -> None:
    queue = hot(held("r1", 2000), dispatched=9000, others=(load("b", stalled_s=4.0),))

    assert plan_rebalance(queue) == ()


def test_nobody_leaves_the_pair_or_goes_to_an_instance_that_is_not_ready() -> None:
    draining = InstanceLoad("b", InstanceState.DRAINING, prefill_tokens_per_s=RATE)
    queue = hot(
        held("alone", 3000, other=None),
        held("gone", 3000, other="unknown"),
        held("leaving", 3000, other="b"),
        dispatched=9000,
        others=(draining, load("c")),
    )

    assert plan_rebalance(queue) == ()


def test_a_request_behind_the_last_late_one_stays() -> None:
    # given a late request with a tight SLO in front, and a large one behind it that has time
    queue = hot(
        held("tight", 1000, slo_s=1.5),
        held("relaxed", 5000, slo_s=60.0),
        dispatched=3000,
        others=(load("b"),),
    )

    assert [move.request_id for move in plan_rebalance(queue)] == ["tight"]


tokens = st.integers(1, 4000)
queues = st.builds(
    lambda dispatched, requests, pendings: hot(
        *(
            held(f"r{i}", here, other=other, other_tokens=there, waited_s=waited / 2, slo_s=slo)
            for i, (here, there, other, waited, slo) in enumerate(requests)
        ),
        dispatched=dispatched,
        others=tuple(load(name, pending=pending) for name, pending in zip("bcd", pendings, strict=True)),
    ),
    st.integers(0, 8000),
    st.lists(
        st.tuples(
            tokens, tokens, st.sampled_from(["b", "c", "d", None]), st.integers(0, 6), st.sampled_from([2.0, 5.0])
        ),
        max_size=12,
    ),
    st.tuples(*[st.integers(0, 6000)] * 3),
)


def reference_plan(queue: HotQueue) -> tuple[Move, ...]:
    """The rule written out: after every move, look at everybody again."""
    left, arriving, moves = list(queue.held), {"b": 0, "c": 0, "d": 0}, []

    def here_s(request: StoredRequest) -> float:
        ahead = sum(other.uncached_tokens for other in left[: left.index(request) + 1])
        return waited_s(request, queue.now_ms) + (queue.load.dispatched_tokens + ahead) / RATE

    def there_s(request: StoredRequest) -> float:
        target = queue.alternatives[request.alternative_id or ""]
        extra = arriving[target.instance_id] + request.alternative_uncached_tokens
        return waited_s(request, queue.now_ms) + expected_ttft_s(target, extra)

    while True:
        late = [index for index, request in enumerate(left) if here_s(request) > request.slo_ms / 1000]
        if not late:
            break
        eligible = [r for r in left[: late[-1] + 1] if r.alternative_id and there_s(r) < r.slo_ms / 1000]
        gains = [(here_s(r) - there_s(r), -queue.held.index(r), r) for r in eligible]
        gains = [gain for gain in gains if gain[0] > 0]
        if not gains:
            break
        benefit_s, _, best = max(gains, key=lambda gain: gain[:2])
        left.remove(best)
        arriving[best.alternative_id or ""] += best.alternative_uncached_tokens
        moves.append(Move(best.request_id, best.alternative_id or "", benefit_s))
    return tuple(moves)


@given(queues)
def test_the_fast_plan_is_the_plain_rule(queue: HotQueue) -> None:
    assert plan_rebalance(queue) == reference_plan(queue)


def test_only_ready_instances_with_held_requests_are_swept_the_longest_work_first() -> None:
    held_here = {"queued_requests": 1}
    loads = {
        name: InstanceLoad(name, state, prefill_tokens_per_s=rate, pending_tokens=pending, **figures)
        for name, state, rate, pending, figures in (
            ("little", InstanceState.READY, RATE, 2000, held_here),
            ("much", InstanceState.READY, RATE, 3000, held_here),
            ("fast", InstanceState.READY, 10 * RATE, 9000, held_here),
            ("nobody-held", InstanceState.READY, RATE, 9000, {}),
            ("draining", InstanceState.DRAINING, RATE, 9000, held_here),
        )
    }

    assert plan_sweep(loads) == ("much", "little", "fast")


def test_a_request_has_waited_since_its_first_reservation_and_never_less_than_nothing() -> None:
    assert waited_s(held("r", 1, waited_s=2.5), NOW_MS) == 2.5
    assert waited_s(held("r", 1), NOW_MS - 300) == 0.0
