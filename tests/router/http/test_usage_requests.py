"""Which instances are asked for a stream's usage."""

from __future__ import annotations

import pytest

from dualmap.router.http.usage_requests import LOOK_AGAIN_S, LOOK_AGAIN_STREAMS, UsageRequests


class Time:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


def test_an_unknown_instance_is_not_asked(time: Time) -> None:
    usage = UsageRequests(time)
    assert not usage.needed("http://a") and not usage.needed("http://a")


def test_an_instance_is_asked_by_what_its_last_stream_that_was_not_asked_showed(time: Time) -> None:
    usage = UsageRequests(time)
    usage.saw("http://a", sends_unrequested=False)
    usage.saw("http://b", sends_unrequested=True)
    assert usage.needed("http://a") and not usage.needed("http://b")
    usage.saw("http://a", sends_unrequested=True)
    usage.saw("http://b", sends_unrequested=False)
    assert not usage.needed("http://a") and usage.needed("http://b")
    usage.forget("http://b")
    assert not usage.needed("http://b")


def test_one_of_many_streams_is_not_asked_and_the_others_go_on_to_be(time: Time) -> None:
    usage = UsageRequests(time)
    usage.saw("http://a", sends_unrequested=False)
    assert all(usage.needed("http://a") for _ in range(2 * LOOK_AGAIN_STREAMS))
    time.now_s = LOOK_AGAIN_S
    assert [usage.needed("http://a") for _ in range(3)] == [False, True, True]
    time.now_s = 3 * LOOK_AGAIN_S
    assert usage.needed("http://a"), "few streams came meanwhile"
