"""Which instances are asked for a stream's usage, and whose clients see it."""

from __future__ import annotations

from functools import partial

import pytest

from dualmap.router.http.usage_requests import LOOK_AGAIN_S, LOOK_AGAIN_STREAMS, UsageRequest, UsageRequests

HIDDEN, SHOWN, AS_SENT = UsageRequest(True, True), UsageRequest(True, False), UsageRequest(False, False)


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


def test_usage_is_requested_from_the_first_stream_on(time: Time) -> None:
    usage = UsageRequests(time)
    asked = [usage.next("http://a", is_charged=charged) for charged in (False, False, True)]
    assert asked == [HIDDEN] * 3


def test_an_instance_that_sends_usage_unasked_is_not_asked_but_where_tokens_are_charged(time: Time) -> None:
    usage = UsageRequests(time)
    usage.saw("http://b", sends_unrequested=True)
    assert usage.next("http://b", is_charged=False) == AS_SENT
    assert usage.next("http://b", is_charged=True) == SHOWN
    usage.saw("http://b", sends_unrequested=False)
    assert usage.next("http://b", is_charged=False) == HIDDEN


def test_one_of_many_streams_goes_as_it_was_sent_but_never_one_whose_tokens_are_charged(time: Time) -> None:
    usage = UsageRequests(time)
    free = partial(usage.next, "http://a", is_charged=False)
    assert {free() for _ in range(2 * LOOK_AGAIN_STREAMS)} == {HIDDEN}
    time.now_s = LOOK_AGAIN_S
    assert usage.next("http://a", is_charged=True) == HIDDEN
    assert [free() for _ in range(3)] == [AS_SENT, HIDDEN, HIDDEN]
    time.now_s = 3 * LOOK_AGAIN_S
    assert free() == HIDDEN, "few streams came meanwhile"


def test_a_broken_connection_changes_nothing_until_the_next_test(time: Time) -> None:
    usage = UsageRequests(time)
    free = partial(usage.next, "http://a", is_charged=False)
    usage.saw("http://a", sends_unrequested=False)
    usage.restarted("http://a")
    usage.restarted("http://never-seen")
    assert {free() for _ in range(40)} == {HIDDEN}
    time.now_s = LOOK_AGAIN_S
    assert [free(), free()] == [AS_SENT, HIDDEN]
