"""The multipart form by which a client uploads a file, read piece by piece: nothing of the file is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dualmap.router.errors import InvalidRequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FILE_FIELD: Final = "file"
_MOST_FIELD_BYTES: Final = 4096
"""Bytes of all fields but the file."""
_MOST_FIELDS: Final = 16


class UploadForm:
    """The fields of a form that have come so far."""

    def __init__(self, content_type: str) -> None:
        """Raises InvalidRequestError where the body is no form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequestError("send the file as multipart/form-data, with the fields purpose and file")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """None until the file begins."""
        try:
            self._parser = MultipartParser(boundary, self._callbacks())
        except FormParserError as error:
            raise InvalidRequestError(f"the form is not valid: {error}") from error
        self._found = bytearray()
        """Bytes of the file in the present piece."""
        self._field_bytes = 0
        self._is_whole = False

    def feed(self, piece: bytes) -> bytes:
        """The bytes of the file in the next piece of the body. Raises InvalidRequestError."""
        self._found = bytearray()
        try:
            self._parser.write(piece)
        except FormParserError as error:
            raise InvalidRequestError(f"the form is not valid: {error}") from error
        return bytes(self._found)

    def end(self) -> None:
        """The body is over. Raises InvalidRequestError where the form is not whole, or has no file."""
        if not self._is_whole:
            raise InvalidRequestError("the form breaks off before its last boundary")
        if self.file_name is None:
            raise InvalidRequestError("the form has no file", param=FILE_FIELD)

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    # callbacks of the parser -------------------------------------------------------------------------------------
    def _begin_part(self) -> None:
        self._header_name, self._header_value, self._disposition = b"", b"", b""
        self._is_file, self._name, self._value = False, "", bytearray()

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name, self._header_value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == FILE_FIELD
        if self._is_file:
            if self.file_name is not None:
                raise InvalidRequestError("the form has two files; upload one after the other", param=FILE_FIELD)
            self.file_name = options.get(b"filename", b"").decode("utf-8", "replace")
        elif len(self.fields) >= _MOST_FIELDS:
            raise InvalidRequestError(f"the form has over {_MOST_FIELDS} fields")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._found += memoryview(data)[start:end]
            return
        self._field_bytes += end - start
        if self._field_bytes > _MOST_FIELD_BYTES:
            raise InvalidRequestError(f"the fields of the form are over {_MOST_FIELD_BYTES} bytes", param=self._name)
        self._value += data[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._is_whole = True
