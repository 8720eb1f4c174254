"""What clients are told of their limits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from dualmap.router.errors import error_body, error_headers
from dualmap.router.tenants.rate_limits import (
    REPORTED_EACH_S,
    LimitReports,
    duration,
    limit_fields,
    over_limit,
    refused_fields,
)
from dualmap.scheduling.tenants.budgets import BudgetGroup, Drawn, Draws, Limit, Measure, Period, budgets_of

NOW = datetime(2027, 1, 15, 12, 0, tzinfo=UTC)
LIMITS = (
    Limit(Measure.REQUESTS, Period.MINUTE, 600),
    Limit(Measure.TOKENS, Period.MINUTE, 60_000),
    Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 30_000),
    Limit(Measure.REQUESTS, Period.IN_FLIGHT, 8),
)
DRAWS = BudgetGroup(budgets_of("acme", LIMITS)).draws(1000, 200)
CHAT = "/v1/chat/completions"


@dataclass
class Request:
    """A request that has drawn this."""

    drawn: Drawn | None


def test_an_answer_tells_what_is_left_as_openai_does() -> None:
    fields = dict(limit_fields(CHAT, DRAWS, Drawn((599, 58_800, 29_000, 7)), NOW))

    assert fields == {
        b"x-ratelimit-limit-requests": b"600",
        b"x-ratelimit-remaining-requests": b"599",
        b"x-ratelimit-reset-requests": b"100ms",
        b"x-ratelimit-limit-tokens": b"60000",
        b"x-ratelimit-remaining-tokens": b"58800",
        b"x-ratelimit-reset-tokens": b"1.2s",
    }


def test_an_answer_of_anthropics_api_tells_it_as_that_one_does() -> None:
    fields = dict(limit_fields("/v1/messages", DRAWS, Drawn((599, -100, 29_000, 7)), NOW))

    assert fields[b"anthropic-ratelimit-requests-remaining"] == b"599"
    assert fields[b"anthropic-ratelimit-tokens-remaining"] == b"0"
    assert fields[b"anthropic-ratelimit-tokens-reset"] == b"2027-01-15T12:01:00Z"
    assert fields[b"anthropic-ratelimit-input-tokens-limit"] == b"30000"


def test_the_fields_of_answers_are_made_once_a_second_for_the_same_budgets_and_api() -> None:
    reports, others = LimitReports(), BudgetGroup(budgets_of("other", LIMITS)).draws(1000, 200)

    def left(path: str, requests: int, now_s: float, draws: Draws = DRAWS) -> dict[bytes, bytes]:
        return dict(reports.fields(path, draws, Request(Drawn((requests, 58_800, 29_000, 7))), now_s))

    first = left(CHAT, 599, 5.0)
    assert first[b"x-ratelimit-remaining-requests"] == b"599"
    assert left(CHAT, 590, 5.0 + REPORTED_EACH_S / 2) == first
    assert left(CHAT, 580, 5.5, others)[b"x-ratelimit-remaining-requests"] == b"580"
    assert left("/v1/messages", 570, 5.5)[b"anthropic-ratelimit-requests-remaining"] == b"570"
    assert left(CHAT, 560, 5.0 + REPORTED_EACH_S)[b"x-ratelimit-remaining-requests"] == b"560"
    assert not LimitReports().fields(CHAT, DRAWS, Request(None), 5.0), "it has drawn nothing yet"


def test_of_several_limits_the_tightest_is_told() -> None:
    limits = (*LIMITS[:1], Limit(Measure.REQUESTS, Period.MINUTE, 60, "key:ci"))
    draws = BudgetGroup(budgets_of("acme", limits)).draws(1000, 200)

    fields = dict(limit_fields(CHAT, draws, Drawn((599, 12)), NOW))

    assert (fields[b"x-ratelimit-limit-requests"], fields[b"x-ratelimit-remaining-requests"]) == (b"60", b"12")


def test_of_a_limit_that_is_divided_the_reset_is_that_of_the_part() -> None:
    fields = dict(limit_fields(CHAT, DRAWS, Drawn((299, 58_800, 29_000, 7), parts={0: 300}), NOW))

    assert fields[b"x-ratelimit-remaining-requests"] == b"299"
    assert fields[b"x-ratelimit-reset-requests"] == b"200ms"
    assert fields[b"x-ratelimit-reset-tokens"] == b"1.2s"


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0ms"), (0.0121, "13ms"), (1.5, "1.5s"), (360.0, "6m0s")])
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_refusal_says_which_limit_is_met_and_when_to_try_again() -> None:
    error = over_limit("acme", DRAWS, Drawn((599, -700, 29_000, 7), 1, 0.7))

    body = error_body(error, CHAT)["error"]
    assert body["message"] == (
        "the limit of tenant acme is 60,000 tokens a minute: 500 are left, and this request takes 1,200; try again in"
        " 700ms"
    )
    assert (error.status, body["type"], body["code"]) == (429, "tokens", "rate_limit_exceeded")
    assert error_headers(error) == {"retry-after": "1"}


def test_anthropics_clients_get_their_own_kind_of_error() -> None:
    error = over_limit("acme", DRAWS, Drawn((-1, 0, 0, 0), 0, 3.0))

    assert error_body(error, "/v1/messages")["error"]["type"] == "rate_limit_error"


def test_a_spent_quota_is_no_reason_to_try_again() -> None:
    draws = BudgetGroup(budgets_of("acme", (Limit(Measure.TOKENS, Period.MONTH, 10_000),))).draws(1000, 200)

    error = over_limit("acme", draws, Drawn((-900,), 0))

    assert error_body(error, CHAT)["error"]["code"] == "insufficient_quota"
    assert error_headers(error) == {"x-should-retry": "false"}
    assert "next month" in error.message


def test_a_request_beyond_the_whole_limit_is_told_to_be_shorter() -> None:
    draws = BudgetGroup(budgets_of("acme", (Limit(Measure.TOKENS, Period.MINUTE, 1000),))).draws(1000, 200)

    error = over_limit("acme", draws, Drawn((-200,), 0, 12.0))

    assert "shorten it" in error.message
    assert error_headers(error) == {"x-should-retry": "false"}


def test_a_limit_on_what_is_in_flight_names_no_time() -> None:
    error = over_limit("acme", DRAWS, Drawn((1, 1, 1, -1), 3))

    assert "try again when others have ended" in error.message
    assert error.retry_after_s == 1.0


# the fields of a refusal ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "left", "told"),
    [
        (Limit(Measure.REQUESTS, Period.MINUTE, 60), 0, "requests 60 0 1m0s"),
        (Limit(Measure.REQUESTS, Period.DAY, 40), 0, "requests 40 0 720m0s"),
        (Limit(Measure.TOKENS, Period.MONTH, 9000), 300, "tokens 9000 300 23760m0s"),
        (Limit(Measure.REQUESTS, Period.IN_FLIGHT, 8), 0, "requests 8 0 1s"),
        (Limit(Measure.TOKENS, Period.IN_FLIGHT, 5000), 900, "tokens 5000 900 1s"),
        (Limit(Measure.PROMPT_TOKENS, Period.MINUTE, 6000), 500, "tokens 6000 500 55s"),
        (Limit(Measure.OUTPUT_TOKENS, Period.MINUTE, 6000), -300, "tokens 6000 0 1m3s"),
    ],
)
def test_a_refusal_tells_the_limit_that_caused_it_whatever_its_kind(limit: Limit, left: int, told: str) -> None:
    draws = BudgetGroup(budgets_of("acme", (limit,))).draws(1000, 200)
    drawn = Drawn((left - draws.costs[0],), 0, 30.0)
    kind, *figures = told.encode().split()
    names = [b"x-ratelimit-%b-%b" % (name, kind) for name in (b"limit", b"remaining", b"reset")]

    assert dict(refused_fields(CHAT, draws, drawn, NOW)) == dict(zip(names, figures, strict=True))

    fields = dict(refused_fields("/v1/messages", draws, drawn, NOW))
    assert len(fields) == 3 and all(name.startswith(b"anthropic-ratelimit-") for name in fields)


def test_a_refusal_tells_its_other_limits_as_they_are_without_it() -> None:
    told = dict(refused_fields(CHAT, DRAWS, Drawn((599, 58_800, -700, 7), 2, 1.4), NOW))

    assert told[b"x-ratelimit-remaining-requests"] == b"600"
    assert told[b"x-ratelimit-reset-requests"] == b"0ms"
    assert told[b"x-ratelimit-limit-tokens"] == b"30000", "the limit that is met counts before the others on tokens"
    assert told[b"x-ratelimit-remaining-tokens"] == b"300"


def test_no_client_is_told_to_wait_for_longer_than_it_can_and_the_message_says_how_long_it_is() -> None:
    error = over_limit("acme", DRAWS, Drawn((599, -700, 29_000, 7), 1, 1000.0))
    error.limit_fields = refused_fields(CHAT, DRAWS, Drawn((599, -700, 29_000, 7), 1, 1000.0), NOW)

    headers = error_headers(error)
    assert headers["retry-after"] == "60"
    assert headers["x-ratelimit-limit-tokens"] == "60000"
    assert error.message.endswith("try again in 16m40s")
