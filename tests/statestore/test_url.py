"""Store URLs, right and wrong."""

from __future__ import annotations

import pytest

from statestore.url import StoreUrl, parse_store_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:7000/3", StoreUrl("redis", nodes=(("h", 7000),), db=3)),
        ("rediss://u:p%40ss@h", StoreUrl("rediss", username="u", password="p@ss", nodes=(("h", 6379),))),
        (
            "redis+sentinel://a,b:1/fleet/2",
            StoreUrl("redis", "sentinel", nodes=(("a", 26379), ("b", 1)), master="fleet", db=2),
        ),
        ("rediss+cluster://a", StoreUrl("rediss", "cluster", nodes=(("a", 6379),))),
        ("unix:///tmp/s.sock?db=2", StoreUrl("unix", path="/tmp/s.sock", db=2, query={"db": "2"})),
        ("embedded:///tmp/s.sock", StoreUrl("embedded", path="/tmp/s.sock")),
        ("memory://", StoreUrl("memory")),
    ],
)
def test_a_url_is_taken_apart(url: str, expected: StoreUrl) -> None:
    assert parse_store_url(url) == expected


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "not a URL; use redis://"),
        ("foo", "not a URL; use redis://"),
        ("http://localhost", "unknown scheme 'http'"),
        ("foo://x", "unknown scheme 'foo'; use redis://"),
        ("redis+other://x", "unknown scheme"),
        ("redis://h/first", "database is not a number"),
        ("unix:///s.sock?db=x", "database is not a number"),
        ("unix://", "path of the socket is missing"),
        ("redis+sentinel://h", "name of the master is missing"),
        ("redis://h:99999/0", "port is not a number up to 65535"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_store_url(url)


def test_a_password_that_breaks_its_url_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="percent-encoded") as caught:
        parse_store_url("redis://:hunter/2@h/0")

    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "alone"), [("memory://", True), ("embedded://", True), ("embedded:///s.sock", False), ("redis://h", False)]
)
def test_which_stores_one_process_alone_can_see(url: str, alone: bool) -> None:
    assert parse_store_url(url).of_one_process is alone
