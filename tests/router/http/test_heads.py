from __future__ import annotations

import orjson

from dualmap.router.errors import InvalidApiKeyError, MethodNotAllowedError, QueueFullError
from dualmap.router.http.heads import (
    error_answer,
    fields_for_client,
    fields_for_instance,
    options_answer,
    response_head,
)


def test_a_head_is_serialised_with_its_reason() -> None:
    assert response_head(429, [(b"a", b"b")]) == b"HTTP/1.1 429 Too Many Requests\r\na: b\r\n\r\n"
    assert response_head(599, []) == b"HTTP/1.1 599 Unknown\r\n\r\n"


def test_fields_of_the_client_connection_stay_there() -> None:
    fields = [
        (b"connection", b"keep-alive, X-Private"),
        (b"x-private", b"1"),
        (b"te", b"trailers"),
        (b"host", b"fleet"),
        (b"content-length", b"3"),
        (b"accept-encoding", b"gzip"),
        (b"x-request-id", b"other"),
        (b"traceparent", b"00-a-b-01"),
        (b"authorization", b"Bearer secret"),
        (b"x-api-key", b"secret"),
    ]
    assert fields_for_instance(fields, keep_credentials=False) == b"traceparent: 00-a-b-01\r\nvia: 1.1 dualmap\r\n"
    kept = fields_for_instance(fields, keep_credentials=True)
    assert (
        kept == b"traceparent: 00-a-b-01\r\nauthorization: Bearer secret\r\nx-api-key: secret\r\nvia: 1.1 dualmap\r\n"
    )


def test_the_proxy_that_passed_a_request_on_before_is_named_first() -> None:
    fields = fields_for_instance([(b"via", b"1.1 haproxy")], keep_credentials=False, http_10=True)

    assert fields == b"via: 1.1 haproxy\r\nvia: 1.0 dualmap\r\n"


def test_fields_of_the_instance_connection_and_forged_fleet_fields_stay_there() -> None:
    fields = [
        (b"connection", b"close, x-hop"),
        (b"x-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"x-dualmap-instance", b"forged"),
        (b"x-dualmap-expected-ttft-ms", b"1"),
        (b"content-type", b"text/plain"),
    ]
    assert fields_for_client(fields) == [(b"content-type", b"text/plain")]


def test_errors_are_openai_objects_with_the_fields_their_status_asks_for() -> None:
    head, _, body = error_answer(QueueFullError("full", retry_after_s=1.2), close=False).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ") and b"\r\nretry-after: 2" in head
    assert b"content-length: %d\r\n" % len(body) in head
    assert set(orjson.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert b"www-authenticate: Bearer" in error_answer(InvalidApiKeyError("key"), close=False)
    refused = error_answer(MethodNotAllowedError("no"), close=True, path="/v1/score", bodiless=True)
    assert b"\r\nallow: POST, OPTIONS" in refused and b"\r\nconnection: close" in refused
    assert refused.endswith(b"\r\n\r\n")


def test_options_has_no_body() -> None:
    assert options_answer("/v1/embeddings", close=False) == b"HTTP/1.1 204 No Content\r\nallow: POST, OPTIONS\r\n\r\n"


def test_an_instance_gets_the_name_of_a_run_as_vllms_own_field_in_place_of_the_clients() -> None:
    fields = [(b"x-session-id", b"secret name"), (b"accept", b"*/*")]

    assert fields_for_instance(fields, keep_credentials=False, run="0a1b") == (
        b"accept: */*\r\nvia: 1.1 dualmap\r\nx-session-id: 0a1b\r\n"
    )
    assert b"x-session-id: secret name" in fields_for_instance(fields, keep_credentials=False)
