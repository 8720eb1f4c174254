"""Store URLs, right and wrong."""

from __future__ import annotations

import pytest

from dualmap.statestore.url import StoreUrl, parse_store_url, without_password


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
        ("unix:///tmp/s.sock?db=2", StoreUrl("unix", path="/tmp/s.sock", db=2, options={"db": "2"})),
        (
            "rediss://h?ssl_ca_certs=/ca%20of%20ours.pem&ssl_check_hostname=false",
            StoreUrl(
                "rediss",
                nodes=(("h", 6379),),
                options={"ssl_ca_certs": "/ca of ours.pem", "ssl_check_hostname": "false"},
            ),
        ),
        (
            "redis+sentinel://:data@a/fleet?sentinel_username=u&sentinel_password=p+%26",
            StoreUrl(
                "redis",
                "sentinel",
                password="data",
                nodes=(("a", 26379),),
                master="fleet",
                options={"sentinel_username": "u", "sentinel_password": "p+&"},
            ),
        ),
        ("redis+cluster://a/0", StoreUrl("redis", "cluster", nodes=(("a", 6379),))),
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
        ("redis+cluster://h/1", "a cluster has database 0 alone"),
        ("redis://somebody@h", "a user without a password"),
        ("redis+sentinel://h/fleet?sentinel_username=u", "sentinel_username without sentinel_password"),
        ("rediss://h?ssl_keyfile=/key.pem", "ssl_keyfile without ssl_certfile"),
        ("rediss://h?ssl_ca_cert=/ca.pem", "unknown option 'ssl_ca_cert': this scheme has ssl_ca_certs, ssl_certfile"),
        ("redis://h?ssl_ca_certs=/ca.pem", "this scheme has none, and TLS is spoken with rediss:// alone"),
        ("redis+cluster://h?sentinel_password=p", "unknown option 'sentinel_password'"),
        ("redis+sentinel://h/fleet?sentinel_ssl=true", "unknown option 'sentinel_ssl'"),
        ("rediss://h?ssl_cert_reqs=None", "ssl_cert_reqs must be required or none"),
        ("rediss://h?ssl_ca_certs=", "ssl_ca_certs must be given a value"),
        ("redis+sentinel://h/fleet?sentinel_password=a#b", "must be percent-encoded: %23"),
        ("redis://h:99999/0", "port is not a number up to 65535"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_wrong(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_store_url(url)


@pytest.mark.parametrize("url", ["redis://:hunter/2@h/0", "redis://:hunter?2@h/0", "redis://:1?hunter@h/0"])
def test_a_password_that_breaks_its_url_is_not_repeated(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_store_url(url)

    assert "hunter" not in str(caught.value)
    assert "percent-encoded" in str(caught.value) or "unknown option:" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://store:6379/0", "redis://store:6379/0"),
        ("redis://:hunter2@store", "redis://***:***@store"),
        ("rediss+sentinel://fleet:hunt@er2@one:1,two:2/MASTER", "rediss+sentinel://***:***@one:1,two:2/MASTER"),
        ("redis+sentinel://a/m?sentinel_username=u&sentinel_password=p", "redis+sentinel://a/m?sentinel_username=***&sentinel_password=***"),
        ("redis+sentinel://a/m?sentinel_password=hunt@er2", "redis+sentinel://***:***@er2"),
        ("redis://h?password=hunter2", "redis://h?password=***"),
        ("unix://fleet:hunter2@/run/store.sock?db=1", "unix://***:***@/run/store.sock?db=1"),
        ("memory://", "memory://"),
        ("rediss://h?ssl_keyfile=/run/key.pem", "rediss://h?ssl_keyfile=/run/key.pem"),
        ("https://hooks/x?channel=ops&access_token=hunter2#hunt", "https://hooks/x?channel=ops&access_token=***#hunt"),
        ("http://h:1/?api_key=hunter2&Sig=hunter3", "http://h:1/?api_key=***&Sig=***"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_its_passwords(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "alone"), [("memory://", True), ("embedded://", True), ("embedded:///s.sock", False), ("redis://h", False)]
)
def test_which_stores_one_process_alone_can_see(url: str, alone: bool) -> None:
    assert parse_store_url(url).of_one_process is alone
