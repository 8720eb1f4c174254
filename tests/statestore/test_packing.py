"""Commands as bytes."""

from __future__ import annotations

import hiredis
import pytest

from statestore import packing
from statestore.packing import Argument, PackedKeys, ScriptPacker, pack

SHA = "0123456789abcdef0123456789abcdef01234567"


def read(command: bytes) -> list[bytes]:
    """As a server would."""
    reader = hiredis.Reader()
    reader.feed(command)
    parts: list[bytes] = reader.gets()
    assert reader.gets() is False
    return parts


@pytest.mark.parametrize("keys", [(), (b"one",), (b"one", b"two:{pool}", b"one")])
@pytest.mark.parametrize("arguments", [("",), ("", 7, 1.5, "\u00e9", b"\r\n\x00*$")])
def test_a_script_call_is_packed_like_any_command(keys: tuple[bytes, ...], arguments: tuple[Argument, ...]) -> None:
    packer = ScriptPacker()

    for _ in range(2):  # the second time from what was kept
        assert packer.pack(SHA, keys, arguments) == pack(("EVALSHA", SHA, len(keys), *keys, *arguments))


def test_what_is_packed_is_what_a_server_reads() -> None:
    call = ScriptPacker().pack(SHA, (b"key",), ("", 12))

    assert read(call) == [b"EVALSHA", SHA.encode(), b"1", b"key", b"", b"12"]


def test_keys_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_PACKED_KEYS", 3)
    keys = PackedKeys()

    for number in range(10):
        assert keys[b"key:%d" % number] == b"$5\r\nkey:%d\r\n" % number
        assert len(keys) <= 3
