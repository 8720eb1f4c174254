"""Commands as bytes."""

from __future__ import annotations

import hiredis

from statestore.packing import pack


def test_what_is_packed_is_what_a_server_reads() -> None:
    reader = hiredis.Reader()
    reader.feed(pack(("EVALSHA", "sha", 1, b"\r\n\x00*$", 1.5, "\u00e9")))

    assert reader.gets() == [b"EVALSHA", b"sha", b"1", b"\r\n\x00*$", b"1.5", "\u00e9".encode()]
