"""The clock of a server, as a client knows it."""

from __future__ import annotations

from dualmap.statestore.redis.server_clock import ServerClock

HOUR_MS = 3_600_000


def test_a_time_is_never_later_than_the_servers_own() -> None:
    clock = ServerClock()

    clock.observe(10_000, sent_s=1.0, answered_s=1.5)  # it was 10 s there at some time between

    assert clock.time_ms(1.5) == 10_000
    assert clock.time_ms(4.5) == 13_000


def test_a_quicker_answer_narrows_what_a_slow_one_left_open() -> None:
    clock = ServerClock()
    clock.observe(10_000, sent_s=1.0, answered_s=1.5)

    clock.observe(10_300, sent_s=1.5, answered_s=1.501)
    clock.observe(20_900, sent_s=12.0, answered_s=13.0)

    assert clock.time_ms(1.501) == 10_300
    assert clock.time_ms(11.501) == 20_300


def test_a_server_whose_clock_was_set_is_believed() -> None:
    clock = ServerClock()
    clock.observe(10 * HOUR_MS, sent_s=1.0, answered_s=1.0)

    for step_ms in (HOUR_MS, -HOUR_MS):
        clock.observe(10 * HOUR_MS + step_ms, sent_s=1.0, answered_s=1.0)

        assert clock.time_ms(1.0) == 10 * HOUR_MS + step_ms


def test_a_refusal_tells_the_time() -> None:
    clock = ServerClock()
    clock.observe(1000, sent_s=1.0, answered_s=1.0)

    clock.set(HOUR_MS, answered_s=2.0)

    assert clock.time_ms(3.0) == HOUR_MS + 1000
