"""Fields of a form (``multipart/form-data``), read whole and in one way only.

Readers of forms differ in what they make of odd ones: parameters that are escaped or split, line ends of their own, a
boundary that is said twice, bytes behind the last part. Such a form is not read here. What is read has one meaning.
"""

from __future__ import annotations

import re
from typing import Final

from dualmap.scheduling.values import value

MAX_FORM_FIELDS: Final = 1000
"""Most fields of a form; Starlette takes no more either."""
_MAX_HEAD_BYTES: Final = 16 << 10

_MEDIA_TYPE: Final = re.compile(
    rb"multipart/form-data[ \t]*;[ \t]*(?:charset=\"?utf-8\"?[ \t]*;[ \t]*)?"
    rb"boundary=(?:\"([^\"\\\r\n]{1,70})\"|([^\s\";,]{1,70}))(?:[ \t]*;[ \t]*charset=\"?utf-8\"?)?[ \t]*;?",
    re.IGNORECASE,
)
_DISPOSITION: Final = re.compile(rb"content-disposition:[ \t]*form-data", re.IGNORECASE)
_PARAMETER: Final = re.compile(
    rb'[ \t]*;[ \t]*(name|filename\*?)=(?:"((?:[^"\\\r\n]|\\")*)"|([^\s";,\\]+))', re.IGNORECASE
)
_PLAIN_ENCODING: Final = re.compile(rb"content-transfer-encoding:[ \t]*(?:7bit|8bit|binary)[ \t]*", re.IGNORECASE)


class UnreadableFormError(ValueError):
    """The bytes are no form that has one meaning; the message says why."""


@value
class FormField:
    name: str
    is_file: bool
    part: tuple[int, int]
    """Span of the whole field in the body, the delimiter before it included."""
    span: tuple[int, int]
    """Span of its value."""


def form_fields(body: bytes, media_type: bytes) -> list[FormField]:
    """The fields of a form in their order. Values are not copied, files among them.

    Raises:
        UnreadableFormError: readers may differ in what it says.
    """
    found = _MEDIA_TYPE.fullmatch(media_type)
    if found is None:
        raise UnreadableFormError("the content-type of the form does not name one plain boundary")
    delimiter = b"--" + (found[1] or found[2])
    if not body.startswith(delimiter):
        raise UnreadableFormError("the form does not begin with its boundary")
    between, fields = b"\r\n" + delimiter, list[FormField]()
    start, pos = 0, len(delimiter)
    while body[pos : pos + 2] == b"\r\n":
        head = pos + 2
        value_at = body.find(b"\r\n\r\n", pos, head + _MAX_HEAD_BYTES)
        if value_at < 0:
            raise UnreadableFormError("a field of the form has no end of its headers")
        end = body.find(between, value_at + 2)
        if end < 0:
            raise UnreadableFormError("the form has no end")
        name, is_file = _named(body[head:value_at])
        fields.append(FormField(name, is_file, (start, end + 2), (min(value_at + 4, end), end)))
        if len(fields) > MAX_FORM_FIELDS:
            raise UnreadableFormError(f"the form has over {MAX_FORM_FIELDS} fields")
        start, pos = end + 2, end + len(between)
    if body[pos : pos + 2] != b"--" or body[pos + 2 :].strip(b"\r\n"):
        raise UnreadableFormError("the form goes on behind a boundary where no field begins")
    return fields


def _named(head: bytes) -> tuple[str, bool]:
    """The name of a field, and whether it is a file, by its header lines."""
    name: bytes | None = None
    is_file = False
    for line in head.split(b"\r\n"):
        disposition = _DISPOSITION.match(line)
        if disposition is None:
            _check_other(line)
            continue
        if name is not None:
            raise UnreadableFormError("a field of the form says its name twice")
        pos = disposition.end()
        while (parameter := _PARAMETER.match(line, pos)) is not None:
            pos = parameter.end()
            if parameter[1].lower() != b"name":
                is_file = True
            elif name is None:
                name = parameter[3] if parameter[2] is None else parameter[2]
            else:
                raise UnreadableFormError("a field of the form says its name twice")
        if line[pos:].strip(b" \t;") or name is None or b"\\" in name or b"%" in name:
            raise UnreadableFormError("a field of the form does not say its name plainly")
    if name is None:
        raise UnreadableFormError("a field of the form has no name")
    try:
        return name.decode(), is_file
    except UnicodeDecodeError as error:
        raise UnreadableFormError("the name of a field of the form is no UTF-8") from error


def _check_other(line: bytes) -> None:
    if line[:1] in (b" ", b"\t", b":") or b"\r" in line or b"\n" in line or b":" not in line:
        raise UnreadableFormError("a field of the form has a header that goes over several lines, or none")
    lower = line.lower()
    if lower.startswith(b"content-disposition"):
        raise UnreadableFormError("a field of the form does not say its name plainly")
    if lower.startswith(b"content-transfer-encoding") and _PLAIN_ENCODING.fullmatch(line) is None:
        raise UnreadableFormError("a field of the form is encoded")
