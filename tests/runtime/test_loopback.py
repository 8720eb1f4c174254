"""Which hosts are of this machine alone."""

from __future__ import annotations

import pytest

from dualmap.runtime.loopback import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_these_are(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "router", "localhost.example"])
def test_these_are_not(host: str) -> None:
    assert not is_loopback(host)
