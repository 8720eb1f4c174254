"""Which instances are asked for a stream's usage."""

from __future__ import annotations

import pytest

from dualmap.router.http.usage_asks import LOOK_AGAIN_S, LOOK_AGAIN_STREAMS, UsageAsks


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


def test_an_unknown_instance_is_not_asked(time: Time) -> None:
    asks = UsageAsks(time)
    assert not asks.asks("http://a") and not asks.asks("http://a")


def test_an_instance_is_asked_by_what_its_last_stream_that_was_not_asked_showed(time: Time) -> None:
    asks = UsageAsks(time)
    asks.saw("http://a", sends_unasked=False)
    asks.saw("http://b", sends_unasked=True)
    assert asks.asks("http://a") and not asks.asks("http://b")
    asks.saw("http://a", sends_unasked=True)
    asks.saw("http://b", sends_unasked=False)
    assert not asks.asks("http://a") and asks.asks("http://b")
    asks.forget("http://b")
    assert not asks.asks("http://b")


def test_one_of_many_streams_is_not_asked_and_the_others_go_on_to_be(time: Time) -> None:
    asks = UsageAsks(time)
    asks.saw("http://a", sends_unasked=False)
    assert all(asks.asks("http://a") for _ in range(2 * LOOK_AGAIN_STREAMS))
    time.now_s = LOOK_AGAIN_S
    assert [asks.asks("http://a") for _ in range(3)] == [False, True, True]
    time.now_s = 3 * LOOK_AGAIN_S
    assert asks.asks("http://a"), "few streams came meanwhile"
