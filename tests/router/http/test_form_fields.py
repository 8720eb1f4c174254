"""Forms: read whole, wherever a field stands, and not read at all where readers differ."""

from __future__ import annotations

import pytest

from dualmap.router.http.form_fields import MAX_FORM_FIELDS, UnreadableFormError, form_fields

MEDIA_TYPE = b"multipart/form-data; boundary=b"
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n%b\r\n'
END = b"--b--\r\n"


def field(name: bytes, value: bytes, headers: bytes = b"") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%b"\r\n%b\r\n%b\r\n' % (name, headers, value)


def values(form: bytes, media_type: bytes = MEDIA_TYPE) -> list[tuple[str, bytes]]:
    return [(each.name, form[slice(*each.span)]) for each in form_fields(form, media_type)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_field_is_found_wherever_it_stands(place: int) -> None:
    parts = [FILE % (b"RIFF\r\n--a" * 20_000)] * 2
    parts.insert(place, field(b"model", b"whisper"))
    form = b"".join(parts) + END

    assert dict(values(form))["model"] == b"whisper"


def test_each_field_has_its_name_its_value_and_its_place() -> None:
    form = FILE % b"x" + field(b"model", b" a b ", b"x: y\r\n" * 9) + field(b"empty", b"") + END

    found = form_fields(form, MEDIA_TYPE)

    assert values(form) == [("file", b"x"), ("model", b" a b "), ("empty", b"")]
    assert [each.is_file for each in found] == [True, False, False]
    assert b"".join(form[slice(*each.part)] for each in found) + END == form


@pytest.mark.parametrize(
    "media_type",
    [b'multipart/form-data; boundary="b"', b"Multipart/Form-Data;boundary=b;charset=UTF-8", MEDIA_TYPE + b";"],
)
def test_a_boundary_may_be_written_in_the_usual_ways(media_type: bytes) -> None:
    assert values(field(b"model", b"m") + END, media_type) == [("model", b"m")]


@pytest.mark.parametrize(
    "media_type",
    [b"multipart/form-data", MEDIA_TYPE + b"; boundary=c", MEDIA_TYPE + b"; charset=utf-7",
     b"multipart/mixed; boundary=b", b"multipart/form-data; boundary*=utf-8''b"],
)  # fmt: skip
def test_a_form_without_one_plain_boundary_is_not_read(media_type: bytes) -> None:
    with pytest.raises(UnreadableFormError, match="boundary"):
        values(field(b"model", b"m") + END, media_type)


@pytest.mark.parametrize(
    "disposition",
    [
        b'Content-Disposition: form-data; name ="model"',
        b'Content-Disposition: form-data; name= "model"',
        b"Content-Disposition: form-data; name*=utf-8''model",
        b"Content-Disposition: form-data; name*0=mo; name*1=del",
        b'Content-Disposition: form-data; name="mo\\del"',
        b'Content-Disposition: form-data; name="%6dodel"',
        b'Content-Disposition: form-data; name="x"; name="model"',
        b'Content-Disposition: form-data; name="x"\r\nContent-Disposition: form-data; name="model"',
        b'Content-Disposition: form-data; name="x"\r\n ; name="model"',
        b'Content-Disposition : form-data; name="model"',
        b'Content-Disposition: form-data; filename="a\\\\"; name="model"',
        b'Content-Disposition: attachment; name="model"',
        b'Content-Disposition: form-data; name="model"\r\nContent-Transfer-Encoding: base64',
        b"Content-Type: text/plain",
        b"no header at all",
    ],
)
def test_a_field_that_readers_name_differently_makes_the_form_unread(disposition: bytes) -> None:
    with pytest.raises(UnreadableFormError):
        values(FILE % b"x" + b"--b\r\n" + disposition + b"\r\n\r\nm\r\n" + END)


@pytest.mark.parametrize(
    "form",
    [
        b"",
        END,
        b"preamble\r\n" + field(b"a", b"b") + END,
        field(b"a", b"b"),
        field(b"a", b"b") + END + field(b"model", b"m") + END,
        field(b"a", b"b") + b"--bc\r\n" + field(b"a", b"b") + END,
        field(b"a", b"b").replace(b"\r\n", b"\n") + END,
        b"--b\r\nContent-Disposition: form-data",
    ],
)
def test_a_form_that_is_framed_otherwise_is_not_read(form: bytes) -> None:
    if form == END:
        assert values(form) == []
        return
    with pytest.raises(UnreadableFormError):
        values(form)


def test_a_form_has_a_bounded_number_of_fields() -> None:
    assert len(values(field(b"a", b"") * MAX_FORM_FIELDS + END)) == MAX_FORM_FIELDS
    with pytest.raises(UnreadableFormError, match=str(MAX_FORM_FIELDS)):
        values(field(b"a", b"") * (MAX_FORM_FIELDS + 1) + END)
