"""The messages of Envoy's external processing and of gRPC's health service, as far as they are used here.

They are described by hand: the packages with all of Envoy's messages overwrite modules of other packages. Numbers and
types are those of ``envoy/service/ext_proc/v3/external_processor.proto`` and of the files that it imports;
names of messages do not go over the wire. An enumeration is an ``int32`` here, which looks the same there. Fields that
are not named are kept unread.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

_PACKAGE: Final = "dualmap.ext_proc"
_STRUCT: Final = struct_pb2.Struct.DESCRIPTOR.full_name

_MESSAGES: Final[dict[str, str]] = {
    "HeaderValue": "1 string key, 2 string value, 3 bytes raw_value",
    "HeaderMap": "1 HeaderValue[] headers",
    "HttpHeaders": "1 HeaderMap headers, 3 bool end_of_stream",
    "HttpBody": "1 bytes body, 2 bool end_of_stream",
    "HttpTrailers": "1 HeaderMap trailers",
    "Metadata": "1 Struct{} filter_metadata",
    "ProtocolConfiguration": "1 int32 request_body_mode, 2 int32 response_body_mode",
    "ProcessingRequest": "2 HttpHeaders request_headers|request, 3 HttpHeaders response_headers|request,"
    " 4 HttpBody request_body|request, 5 HttpBody response_body|request, 6 HttpTrailers request_trailers|request,"
    " 7 HttpTrailers response_trailers|request, 8 Metadata metadata_context, 9 Struct{} attributes,"
    " 11 ProtocolConfiguration protocol_config",
    "HeaderValueOption": "1 HeaderValue header, 3 int32 append_action",
    "HeaderMutation": "1 HeaderValueOption[] set_headers, 2 string[] remove_headers",
    "StreamedBodyResponse": "1 bytes body, 2 bool end_of_stream",
    "BodyMutation": "1 bytes body|mutation, 3 StreamedBodyResponse streamed_response|mutation",
    "CommonResponse": "2 HeaderMutation header_mutation, 3 BodyMutation body_mutation, 5 bool clear_route_cache",
    "HeadersResponse": "1 CommonResponse response",
    "BodyResponse": "1 CommonResponse response",
    "TrailersResponse": "1 HeaderMutation header_mutation",
    "ProcessingMode": "4 int32 response_body_mode, 6 int32 response_trailer_mode",
    "HttpStatus": "1 int32 code",
    "ImmediateResponse": "1 HttpStatus status, 2 HeaderMutation headers, 3 bytes body, 5 string details",
    "ProcessingResponse": "1 HeadersResponse request_headers|response, 2 HeadersResponse response_headers|response,"
    " 3 BodyResponse request_body|response, 4 BodyResponse response_body|response,"
    " 5 TrailersResponse request_trailers|response, 6 TrailersResponse response_trailers|response,"
    " 7 ImmediateResponse immediate_response|response, 8 Struct dynamic_metadata, 9 ProcessingMode mode_override",
    "HealthCheckRequest": "1 string service",
    "HealthCheckResponse": "1 int32 status",
}
"""Fields by message: ``NUMBER TYPE NAME``. ``[]`` is a list, ``{}`` a map from texts; of the
fields that have the same name behind ``|`` one is set."""

_SCALARS: Final = {
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
}


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="dualmap/ext_proc.proto", package=_PACKAGE, syntax="proto3")
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(", "):
            _add_field(message, *field.split(" "))
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, number: str, kind: str, name: str) -> None:
    name, _, choice = name.partition("|")
    field = message.field.add(name=name, number=int(number), label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
    if kind.endswith(("[]", "{}")):
        field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    if kind.endswith("{}"):
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "1", "string", "key")
        _add_field(entry, "2", kind[:-2], "value")
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
    else:
        _set_type(field, kind.removesuffix("[]"))
    if choice:
        choices = [each.name for each in message.oneof_decl]
        if choice not in choices:
            message.oneof_decl.add(name=choice)
        field.oneof_index = choices.index(choice) if choice in choices else len(choices)


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = "." + (_STRUCT if kind == "Struct" else f"{_PACKAGE}.{kind}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(_describe().SerializeToString())
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


_made = _classes()
ProcessingRequest: Final[Any] = _made["ProcessingRequest"]
ProcessingResponse: Final[Any] = _made["ProcessingResponse"]
HealthCheckRequest: Final[Any] = _made["HealthCheckRequest"]
HealthCheckResponse: Final[Any] = _made["HealthCheckResponse"]

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3
