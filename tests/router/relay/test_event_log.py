"""Logs of events are read as they are written."""

from __future__ import annotations

from dualmap.router.relay.event_log import unpack


def test_parts_that_differ_are_put_between_what_the_event_before_had() -> None:
    first = b"data: {1}[" + b"7]}"
    log = b"\x00\x00\x0a" + b"data: {1}[" + b"\x00\x00\x03" + b"7]}"
    log += b"\x07\x02\x02" + b"23" + b"\x00\x02\x01" + b"8"

    assert b"".join(unpack(log)) == first + b"\n\n" + b"data: {23}[8]}\n\n"


def test_numbers_have_as_many_bytes_as_they_need() -> None:
    text = b"x" * 300
    log = b"\x00\x00\xac\x02" + text + b"\x00\x00\x00" + b"\xac\x02\x00\x00" + b"\x00\x00\x00"

    assert b"".join(unpack(log)) == text + b"\n\n" + text + b"\n\n"


def test_an_empty_log_has_no_event() -> None:
    assert unpack(b"") == [b""]
