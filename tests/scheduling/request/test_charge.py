"""What a request is charged, by its end and by what was seen of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.request.charge import (
    MOST_CONTEXT_TOKENS,
    NOTHING_COUNTED,
    TEMPLATE_TOKENS,
    Charge,
    Counted,
    Expected,
    charge,
    possible,
)
from dualmap.scheduling.request.machine import (
    Arrived,
    Ended,
    Failed,
    FirstToken,
    Post,
    PrefillPresumed,
    Registered,
    Sent,
)
from dualmap.scheduling.request.outcome import FailureKind, InstanceFailure, Outcome, Usage
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.tenants.budgets import BudgetGroup, Drawn, Limit, Measure, Period, budgets_of
from tests.scheduling.request.lives import Life, member

LIMITS = [Limit(measure, Period.MINUTE, 10_000) for measure in Measure]
GROUP = BudgetGroup(budgets_of("acme", LIMITS))
PROMPT, EXPECTED = 48, 256
ASKED = Expected(PROMPT, EXPECTED, 200, 3000)
GONE = Outcome.CLIENT_GONE
DEAD = InstanceFailure(FailureKind.CLOSED, "the connection broke")
OVERDUE = InstanceFailure(FailureKind.OVERDUE, "the time is over")
SLOW = InstanceFailure(FailureKind.TIMEOUT, "no first byte within 600 s")


def life(**more: object) -> Life:
    draws = GROUP.draws(PROMPT, EXPECTED * int(str(more.get("answers", 1))))
    made = Life(draws=draws, account="acme k - m", expected_output_tokens=EXPECTED, **more)
    made.dispatch()
    return made


def release_of(made: Life) -> Release:
    """The last release of the last event."""
    return [effect.release for effect in made.effects if isinstance(effect, Post)][-1]


def kept(made: Life) -> tuple[int, int, int]:
    """Requests, prompt tokens and tokens of the answer that stay drawn."""
    back = release_of(made).returned
    draws = made.machine.spec.claim.draws
    assert back is not None and draws is not None
    by_name = dict(zip(draws.group.names, map(int.__sub__, draws.costs, back.costs), strict=True))
    requests, prompt, output, both = (by_name[f"acme/{each.value}/minute"] for each in Measure)
    assert both == prompt + output
    return requests, prompt, output


def test_a_usage_that_no_engine_can_have_is_bounded_by_what_is_possible() -> None:
    much = Usage(10**29, 10**29, 10**29)

    assert possible(much, ASKED) == Usage(200 + TEMPLATE_TOKENS, 200 + TEMPLATE_TOKENS, 3000)
    assert possible(much, replace(ASKED, output_limit=None, context_tokens=8192)).output_tokens == 8192
    assert possible(much, Expected(0, 0)) == Usage(*[MOST_CONTEXT_TOKENS] * 3)
    usual = Usage(60, 32, 3000)
    assert possible(usual, ASKED) is usual


@pytest.mark.parametrize(
    ("usage", "counted", "charged"),
    [
        (Usage(50, 16, 300), Counted(299), Charge(50, 300, 16, True)),
        (Usage(50, None, 2), Counted(299), Charge(50, 299, 0, True)),
        (Usage(None, None, 300), Counted(299), Charge(PROMPT, 300)),
        (Usage(50), Counted(299), Charge(50, 299)),
        (None, Counted(299), Charge(PROMPT, 299)),
        (None, NOTHING_COUNTED, Charge(PROMPT, 0)),
        (None, Counted(0, 400), Charge(PROMPT, 100)),
        (None, Counted(0, 400_000), Charge(PROMPT, 3000)),
        (None, None, Charge(PROMPT, EXPECTED, uncounted=True)),
        (Usage(50, None, 7), Counted(0, 400), Charge(50, 7, 0, True)),
    ],
)
def test_the_engines_count_is_charged_and_the_routers_at_least(
    usage: Usage | None, counted: Counted | None, charged: Charge
) -> None:
    assert charge(usage, counted, ASKED, 4.0) == charged


def test_a_client_that_leaves_before_the_first_byte_pays_for_its_request_and_prompt() -> None:
    made = life()
    made.on(Sent())
    made.on(Ended(GONE, None, NOTHING_COUNTED))

    assert kept(made) == (1, PROMPT, 0)
    assert release_of(made).used.startswith(f"1 {PROMPT} 0 0 0 0 0 client_gone expected")


def test_a_request_that_was_never_sent_pays_nothing() -> None:
    made = life()
    made.on(Ended(GONE, None, NOTHING_COUNTED))

    assert kept(made) == (0, 0, 0)


def test_a_client_that_leaves_a_stream_pays_for_what_came_of_it() -> None:
    for usage, output in ((None, 2999), (Usage(PROMPT, None, 3000), 3000), (Usage(PROMPT, None, 5), 2999)):
        made = life()
        for event in (Sent(), FirstToken(), Ended(GONE, usage, Counted(2999))):
            made.on(event)
        assert kept(made) == (1, PROMPT, output)


def test_the_most_that_a_request_may_use_stays_drawn_until_its_instance_reports_a_usage() -> None:
    """One event can have several tokens, so no count of events is exact."""
    most = GROUP.draws(PROMPT, EXPECTED, are_most=True)
    for outcome, usage, stays in ((GONE, None, (PROMPT, EXPECTED)), (Outcome.COMPLETED, Usage(40, 0, 9), (40, 9))):
        made = Life(draws=most, account="acme k - m", expected_output_tokens=EXPECTED)
        made.dispatch()
        for event in (Sent(), FirstToken(), Ended(outcome, usage, Counted(7))):
            made.on(event)
        assert kept(made) == (1, *stays)


def test_a_client_that_leaves_a_whole_answer_while_it_is_computed_pays_what_was_expected() -> None:
    made = life(streams=False)
    for event in (Sent(), PrefillPresumed(), Ended(GONE, None, NOTHING_COUNTED)):
        made.on(event)

    assert kept(made) == (1, PROMPT, EXPECTED)


def test_a_request_that_its_instance_failed_pays_nothing_however_much_of_it_came() -> None:
    for events in ((Sent(), FirstToken(), Failed(DEAD, begun=True)), (Sent(), Failed(DEAD))):
        made = life()
        for event in events:
            made.on(event)
        outcome = Outcome.UPSTREAM_FAILED if len(events) == 3 else GONE
        made.on(Ended(outcome, None, Counted(900)))
        assert kept(made) == (0, 0, 0)


def test_a_request_that_took_too_long_pays_for_what_came_and_blames_no_instance() -> None:
    made = life()
    for event in (Sent(), FirstToken(), Failed(OVERDUE, begun=True), Ended(Outcome.TIMED_OUT, None, Counted(900))):
        made.on(event)

    assert kept(made) == (1, PROMPT, 900)
    assert OVERDUE.verdict.value == "blameless"


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("limit", "tpot_s", "output"), [(None, 0.03, 20_000), (2600, 0.03, 2600), (None, None, 2400)])
def test_a_whole_answer_that_takes_too_long_pays_for_the_time_and_blames_no_instance(
    limit: int | None, tpot_s: float | None, output: int, begun: bool
) -> None:
    made = life(streams=False, output_limit=limit)
    made.fleet.learned = Learned(tpot_s=tpot_s)
    made.machine.target = replace(member("a"), kv_capacity_tokens=100_000)
    made.on(Sent())
    made.on(PrefillPresumed())

    made.on(Failed(SLOW, begun=begun), after_s=600.0)
    if begun:  # by a gateway, which has answered its client
        made.on(Ended(Outcome.TIMED_OUT, None, None))

    assert made.machine.outcome is Outcome.TIMED_OUT
    assert kept(made) == (1, PROMPT, output)
    assert not made.rules.evidence.breakers.failing()
    assert made.machine.tries == 1


def test_a_client_that_leaves_a_long_whole_answer_pays_for_the_time_that_it_took() -> None:
    made = life(streams=False)
    made.fleet.learned = Learned(tpot_s=0.1)
    made.on(Sent())
    made.on(PrefillPresumed(), after_s=2.0)
    made.on(Ended(GONE, None, NOTHING_COUNTED), after_s=300.0)

    assert kept(made) == (1, PROMPT, 3000)


def test_several_whole_answers_are_computed_at_once() -> None:
    made = life(streams=False, answers=3, output_limit=2000)
    made.fleet.learned = Learned(tpot_s=0.1)
    made.on(Sent())
    made.on(PrefillPresumed())
    made.on(Ended(GONE, None, NOTHING_COUNTED), after_s=100.0)

    assert kept(made) == (1, PROMPT, 3000)


@pytest.mark.parametrize(("answered_s", "is_to_blame"), [(None, True), (100.0, True), (590.0, False)])
def test_an_instance_is_to_blame_for_a_short_whole_answer_unless_it_answered_others_meanwhile(
    answered_s: float | None, is_to_blame: bool
) -> None:
    made = life(streams=False, output_limit=100)
    made.on(Sent())
    if answered_s is not None:
        made.rules.evidence.began("a", made.now_s + answered_s)
    for _ in range(4):
        made.rules.evidence.breakers.failed("a", DEAD, made.now_s)

    made.on(Failed(SLOW), after_s=600.0)

    assert (made.rules.evidence.breakers.failing() == {"a"}) is is_to_blame
    assert kept(made) == ((0, 0, 0) if is_to_blame else (1, PROMPT, 0))


@pytest.mark.parametrize("body_tokens", [40, 0])
def test_what_is_passed_on_and_takes_too_long_keeps_what_it_drew_where_it_computes(body_tokens: int) -> None:
    draws = GROUP.draws(PROMPT, EXPECTED)
    made = Life(draws=draws, account="acme k - m", chain=None, streams=False, body_tokens=body_tokens)
    made.on(Arrived())
    made.on(Registered(Drawn()))
    made.on(Sent())

    made.on(Failed(SLOW), after_s=600.0)

    assert kept(made) == ((1, PROMPT, EXPECTED) if body_tokens else (0, 0, 0))
    assert made.machine.failure is not None
    assert (made.machine.failure.kind is FailureKind.OVERDUE) is (body_tokens > 0)


def test_an_instance_is_to_blame_for_a_stream_without_a_first_token_whatever_it_gave_others() -> None:
    made = life()
    made.on(Sent())
    made.rules.evidence.began("a", made.now_s + 599.0)

    made.on(Failed(SLOW), after_s=600.0)

    assert made.machine.failure is SLOW
    assert "Reserve" in made.names


def test_a_request_that_is_refused_as_the_clients_error_counts_as_a_request() -> None:
    made = life()
    made.on(Sent())
    made.on(Ended(Outcome.CLIENT_ERROR, None, NOTHING_COUNTED))

    assert kept(made) == (1, 0, 0)


def test_all_answers_of_a_request_are_bounded_together() -> None:
    made = life(answers=50, output_limit=100)
    for event in (Sent(), FirstToken(), Ended(Outcome.COMPLETED, Usage(PROMPT, None, 10**12), Counted(40))):
        made.on(event)

    assert kept(made) == (1, PROMPT, 5000)


def test_without_any_count_an_answer_that_passes_elsewhere_pays_what_was_drawn() -> None:
    made = life(answers=2)
    for event in (Sent(), FirstToken(), Ended(Outcome.ENDED)):
        made.on(event)

    assert kept(made) == (1, PROMPT, 2 * EXPECTED)


def test_what_a_client_has_left_teaches_nothing_of_the_length_of_answers() -> None:
    made = life()
    for event in (Sent(), FirstToken(), Ended(GONE, Usage(PROMPT, None, 3), Counted(3))):
        made.on(event)

    assert release_of(made).note == ""


def test_a_request_that_is_over_is_charged_once() -> None:
    made = life()
    made.on(Sent())
    made.on(Ended(GONE, None, NOTHING_COUNTED))

    assert made.on(Ended(Outcome.COMPLETED, Usage(PROMPT, None, 3))) == ()
