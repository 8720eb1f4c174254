"""Replies that are written field by field are read as the messages that they are."""

from __future__ import annotations

import pytest
from google.protobuf import json_format, unknown_fields

from dualmap.router.picker import messages
from dualmap.router.picker.ext_proc import ProcessingRequest, ProcessingResponse
from dualmap.router.picker.messages import BodyMode
from tests.router.picker.streams import add_fields, answer_head, head

LENGTHS = [0, 1, 127, 128, 16_383, 16_384, 3_000_000]


def read(reply: bytes) -> dict[str, object]:
    made = ProcessingResponse.FromString(reply)
    assert len(unknown_fields.UnknownFieldSet(made)) == 0
    found: dict[str, object] = json_format.MessageToDict(made, preserving_proto_field_name=True)
    return found


def set_field(name: str, value: str) -> dict[str, object]:
    return {"header": {"key": name, "raw_value": value}, "append_action": 2}


@pytest.mark.parametrize("kind", ["request_headers", "request_body"])
def test_a_choice_is_a_header_and_metadata(kind: str) -> None:
    reply = messages.destination_reply(kind, "10.0.0.1:1,10.0.0.2:2", [(b"a", b"b")], ["c", "d"])
    addresses = "MTAuMC4wLjE6MSwxMC4wLjAuMjoy"
    assert read(reply) == {
        kind: {
            "response": {
                "header_mutation": {
                    "set_headers": [set_field(messages.DESTINATION, addresses), set_field("a", "Yg==")],
                    "remove_headers": ["c", "d"],
                },
                "clear_route_cache": True,
            }
        },
        "dynamic_metadata": {"envoy.lb": {messages.DESTINATION: "10.0.0.1:1,10.0.0.2:2"}},
    }


@pytest.mark.parametrize("length", LENGTHS)
def test_a_body_of_any_length_goes_with_the_choice(length: int) -> None:
    made = ProcessingResponse.FromString(messages.destination_reply("request_body", "a:1", [], [], b"x" * length))
    assert made.request_body.response.body_mutation.body == b"x" * length
    assert made.request_body.response.body_mutation.HasField("body")


@pytest.mark.parametrize("length", LENGTHS)
def test_fields_of_any_length_are_set(length: int) -> None:
    made = ProcessingResponse.FromString(messages.headers_reply([(b"n", b"v" * length)]))
    (field,) = made.response_headers.response.header_mutation.set_headers
    assert (field.header.key, field.header.raw_value) == ("n", b"v" * length)


def test_the_head_of_an_answer_goes_on_with_fields_a_place_for_reports_and_the_wish_for_its_body() -> None:
    assert read(messages.headers_reply([(b"a", b"b")])) == {
        "response_headers": {"response": {"header_mutation": {"set_headers": [set_field("a", "Yg==")]}}}
    }
    assert read(messages.headers_reply([], report_to="10.0.0.1:5/key", wants_body=True)) == {
        "response_headers": {"response": {"header_mutation": {}}},
        "dynamic_metadata": {"envoy.lb": {messages.REPORT_TO: "10.0.0.1:5/key"}},
        "mode_override": {"response_body_mode": int(BodyMode.STREAMED), "response_trailer_mode": 1},
    }


def test_a_head_is_read_as_the_data_plane_reads_one() -> None:
    request = messages.client_request(
        head("/v1//models?a=1#b", method="GET", accept="x", content_type="é").request_headers
    )

    assert (request.method, request.path, request.query) == ("GET", "/v1/models", b"a=1")
    assert request.get(b"host") == b"gateway"
    assert request.get(b"content-type") == "é".encode()
    assert not [name for name, _ in request.fields if name.startswith(b":")]


def test_values_come_as_bytes_or_as_text() -> None:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", value="/v1/x")
    message.request_headers.headers.headers.add(key="a", value="é")
    request = messages.client_request(message.request_headers)
    assert (request.path, request.get(b"a")) == ("/v1/x", "é".encode())


def test_of_an_answer_the_first_field_of_a_name_counts_and_one_without_a_status_has_none() -> None:
    message = answer_head(503, {"content-type": "text/event-stream", "retry-after": "7"})
    add_fields(message.response_headers.headers, {"retry-after": "9"})
    read_head = messages.answer_head(message.response_headers)
    assert read_head.status == 503
    assert read_head.index == {b"content-type": b"text/event-stream", b"retry-after": b"7"}

    assert messages.answer_head(ProcessingRequest().response_headers).status == 0


def test_the_gateways_word_on_who_answered_goes_before_envoys() -> None:
    address, details = messages.served_by(answer_head(served="10.0.0.1:1"))
    assert (address, details.name) == ("10.0.0.1:1", "via_upstream")
    assert messages.served_by(answer_head(served="10.0.0.1:1", by_metadata="10.0.0.2:2"))[0] == "10.0.0.2:2"
    assert messages.served_by(ProcessingRequest()) == ("", messages.CodeDetails())


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        ("", "", ""),
        ("via_upstream", "via_upstream", ""),
        ("upstream_reset_before_response_started{overflow}", "upstream_reset_before_response_started", "overflow"),
        (
            "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
            "upstream_reset_before_response_started",
            "remote_connection_failure",
        ),
        ("route_not_found{", "route_not_found", ""),
    ],
)
def test_the_details_of_an_answer_have_a_name_and_a_reason(text: str, name: str, reason: str) -> None:
    details = messages.CodeDetails.read(text)
    assert (details.name, details.reason, details.text) == (name, reason, text)


def test_a_retry_that_a_limit_of_envoy_prevented_shows_in_its_response_flags() -> None:
    refused = "upstream_reset_before_response_started{remote_connection_failure}"
    for flags, overflows in ((0, False), (1 << 5, False), (1 << 5 | 1 << 7, True)):
        message = answer_head(503, details=refused, flags=flags)
        assert messages.is_overflow(message, messages.served_by(message)[1]) is overflows
