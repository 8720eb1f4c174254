"""The model's name in a body: found wherever it is, replaced without another byte."""

from __future__ import annotations

import orjson
import pytest

from dualmap.router.http.model_field import edited, form_model, form_model_span, json_model_span

FIELD = b'--b\r\nContent-Disposition: form-data; name="model"\r\n%b\r\nwhisper\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="%b"\r\n\r\n%b\r\n'


@pytest.mark.parametrize(
    ("headers", "model"),
    [
        (b"", "whisper"),
        (8 * b"x: y\r\n", "whisper"),
        (9 * b"x: y\r\n", ""),
        (b"x" * 256 + b"\r\n", "whisper"),
        (b"x" * 257 + b"\r\n", ""),
    ],
)
def test_the_search_for_the_model_of_a_form_looks_a_bounded_way_ahead(headers: bytes, model: str) -> None:
    """Else a body that names it on every line is searched to its end from each of them."""
    assert form_model(FIELD % headers + b"--b--\r\n") == model


def test_a_form_may_name_its_model_behind_a_long_file() -> None:
    upload = FILE % (b"a.wav", b"RIFF" * 50_000)
    for form in (FIELD % b"" + upload + b"--b--\r\n", upload + FIELD % b"" + b"--b--\r\n"):
        assert form_model(form) == "whisper"
        assert b"".join(edited(form, [(form_model_span(form), b"real")])) == form.replace(b"whisper", b"real")


def test_a_file_called_model_names_none() -> None:
    form = FILE % (b"model", b"alias\r\n") + b"--b--\r\n"
    assert form_model(form) == ""


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"{}"}',
        b'{ "a": 1e400, "b": 18446744073709551616,\r\n"model"\t:\n "{}" , "c": "\\ud83d" }',
        b'{"model":"x","model":7,"tools":[{"model":"alias"}],"model":"{}","metadata":{"model":"alias"}}',
        b'{"metadata":{"model":"alias"},"m\\u006f\\u0064\\u0065\\u006C":"{}"}',
        b'{"messages":[{"content":"\\"model\\":\\"alias\\""},{"content":"\\\\"}],"a\\"model":"alias","model":"{}"}',
        b'{"a":"model","b":["model","alias"],"model":"{}"}',
    ],
)
@pytest.mark.parametrize("name", ["alias", "model", "0", 'a"\\b', "a,b:{c}"])
def test_only_the_objects_own_model_is_replaced(body: bytes, name: str) -> None:
    sent = body.replace(b"{}", orjson.dumps(name)[1:-1])
    assert b"".join(edited(sent, [(json_model_span(sent), b'"real"')])) == body.replace(b'"{}"', b'"real"')


def test_edits_leave_every_other_byte() -> None:
    assert b"".join(edited(b"abcdef", [((1, 1), b"-"), ((3, 5), b"+")])) == b"a-bc+f"
    assert edited(b"abc", []) == [b"abc"]
