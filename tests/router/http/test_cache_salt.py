"""The salt of a tenant in its requests."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from dualmap.router.errors import InvalidRequestError
from dualmap.router.http.admission import read_at_once, unread_request
from dualmap.router.http.body_edits import edited, field_edit, salt_field
from dualmap.router.http.cache_salt import separate
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.prompts.inference_request import SALTED_PATHS, InferenceRequest
from dualmap.router.tenants.cache_salts import CacheSalts
from dualmap.scheduling.tenants.tenant import Caller, Tenant

SALTS = CacheSalts("a secret")
ACME = Caller(Tenant("acme"), "ci")
CHAT = "/v1/chat/completions"


def sent(
    body: Any, path: str = CHAT, caller: Caller | None = ACME, **fields: str
) -> tuple[InferenceRequest, dict[str, Any]]:
    """The request as the fleet reads it, and the body as an instance gets it."""
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    request = ClientRequest("POST", path, b"", named, http_10=False, keep_alive=True, body=raw, caller=caller)
    read = read_at_once(request, "id")
    assert read is not None
    separate(request, read, SALTS)
    edits = [] if read.cache_salt is None else [field_edit(raw, salt_field(read.cache_salt))]
    return read, orjson.loads(b"".join(edited(raw, edits)))


def sent_unread(raw: bytes) -> InferenceRequest:
    request = ClientRequest("POST", CHAT, b"", [], http_10=False, keep_alive=True, body=raw, caller=ACME)
    read = unread_request(request, "id", "it is beyond the bounds")
    separate(request, read, SALTS)
    return read


@pytest.mark.parametrize("path", sorted(SALTED_PATHS))
def test_a_tenants_salt_replaces_whatever_its_client_sends_in_every_api(path: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"model": "m", "prompt": "hi", "input": "hi", "messages": [{"role": "user", "content": "hi"}]}
    ]
    bodies += [{**bodies[0], "cache_salt": salt} for salt in ("another's", "", 7, None, ["x"])]

    found = [sent(body, path) for body in bodies]

    for read, body in found:
        assert body["cache_salt"] == read.cache_salt
        assert read.prompt is None or read.prompt.salt == read.cache_salt, "the fleet's own books have it too"
    usual, own, *odd = [read.cache_salt for read, _ in found]
    assert usual == SALTS.of(ACME.tenant, None)
    assert own == SALTS.of(ACME.tenant, "another's") != usual
    assert set(odd) == {usual}


def test_the_salt_of_the_gateway_is_the_last_word_of_the_body() -> None:
    body = b'{"prompt": "a }", "cache_salt": "x", "cache_salt": "y" }\n'

    _, made = sent(body, "/v1/completions")

    assert made == {"prompt": "a }", "cache_salt": SALTS.of(ACME.tenant, "y")}
    assert sent(b"{}")[1] == {"cache_salt": SALTS.of(ACME.tenant, None)}


@pytest.mark.parametrize("body", [b"", b"[1]", b"no JSON", b'{"messages": [', '{"prompt":"x"}'.encode("utf-16-le")])
def test_a_body_that_cannot_be_given_a_salt_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="acme"):
        sent(body)


@pytest.mark.parametrize("field", [{"content_encoding": "gzip"}, {"content_type": "multipart/form-data"}])
def test_a_body_that_is_not_the_json_itself_is_refused(field: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError):
        sent({"prompt": "hi"}, **field)


def test_a_body_that_is_not_read_is_refused_by_its_reason() -> None:
    with pytest.raises(InvalidRequestError, match="beyond the bounds"):
        sent_unread(b'{"messages":[],"seed":1}')


def test_other_requests_are_left_alone() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "cache_salt": "mine"}

    for caller in (None, Caller(Tenant("open", shares_cache=True), "ci")):
        read, made = sent(body, caller=caller)
        assert (read.cache_salt, made["cache_salt"]) == (None, "mine")
    assert sent({"prompt": "hi"}, "/tokenize")[1] == {"prompt": "hi"}
