"""The model's name in a body: found wherever it is, replaced without another byte."""

from __future__ import annotations

import orjson
import pytest

from dualmap.router.http.model_field import edited, json_model_span


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
