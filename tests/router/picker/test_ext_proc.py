"""The messages by hand: the numbers and types of their fields, by bytes that Envoy itself writes and reads."""

from __future__ import annotations

from dualmap.router.picker.ext_proc import HealthCheckResponse, ProcessingRequest, ProcessingResponse


def test_a_message_is_read_by_its_fields_numbers_and_what_is_not_named_is_skipped() -> None:
    header = b"\x0a\x05:path\x1a\x02/x"  # key = 1, raw_value = 3
    headers = b"\x0a" + bytes([len(header)]) + header
    head = b"\x0a" + bytes([len(headers)]) + headers + b"\x18\x01"  # headers = 1, end_of_stream = 3
    config = b"\x08\x04\x10\x00\x18\x01"  # both modes, and a field that is not named
    message = ProcessingRequest.FromString(
        b"\x12" + bytes([len(head)]) + head + b"\x50\x01" + b"\x5a" + bytes([len(config)]) + config
    )

    assert message.WhichOneof("request") == "request_headers"
    assert message.request_headers.headers.headers[0].raw_value == b"/x"
    assert message.request_headers.end_of_stream
    assert message.protocol_config.request_body_mode == 4


def test_of_the_phases_one_is_set() -> None:
    message = ProcessingRequest()
    message.request_body.body = b"x"
    message.response_body.body = b"y"
    assert message.WhichOneof("request") == "response_body"
    assert not message.HasField("request_body")


def test_a_reply_has_the_bytes_that_envoy_expects() -> None:
    reply = ProcessingResponse()
    reply.immediate_response.status.code = 503
    reply.immediate_response.body = b"no"
    assert reply.SerializeToString() == b"\x3a\x09\x0a\x03\x08\xf7\x03\x1a\x02no"
    assert HealthCheckResponse(status=1).SerializeToString() == b"\x08\x01"


def test_metadata_are_maps_of_structures() -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb"].fields["key"].string_value = "value"
    message.attributes["filter"].fields["number"].number_value = 1
    read = ProcessingRequest.FromString(message.SerializeToString())
    assert read.metadata_context.filter_metadata["envoy.lb"].fields["key"].string_value == "value"
    assert "other" not in read.attributes
