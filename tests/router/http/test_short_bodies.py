"""A short body reads alike whether what is around its messages was seen before, or never."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmap.api_bodies.plain_list import NATIVE
from dualmap.router.errors import NotFoundError
from dualmap.router.http import short_bodies
from dualmap.router.http.admission import LONG_BODY_BYTES, read_at_once
from dualmap.router.http.request_reader import ClientRequest
from dualmap.router.http.short_bodies import ShortBodies
from dualmap.router.prompts.inference_request import InferenceRequest, response_id
from dualmap.router.prompts.prompt import TokenizedPrompt, read_prompt
from dualmap.router.prompts.run_identity import SentRun
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.tenants.tenant import Tenant
from tests.support.bodies import BODIES
from tests.support.conversations import CHAT, MESSAGES, RESPONSES, RULE, TENANT, Seen, bodies_of, request_of, seen

native = pytest.mark.skipif(NATIVE is None, reason="nothing native reads bodies")
HEADERS: list[list[tuple[bytes, bytes]]] = [
    [],
    [(b"x-slo-ttft-ms", b"2500")],
    [(b"x-dualmap-priority", b"batch"), (b"x-session-id", b"run-1")],
    [(b"content-type", b"application/json"), (b"x-request-id", b"mine")],
    [(b"content-encoding", b"gzip")],
    [(b"content-type", b"multipart/form-data; boundary=x")],
]
READER = ShortBodies(trusts_transfers=False)


def sent(path: str, body: bytes, headers: list[tuple[bytes, bytes]], tenant: Tenant | None = TENANT) -> ClientRequest:
    request = ClientRequest("POST", path, b"", headers, http_10=False, keep_alive=True, body=body)
    request.caller = request_of(path, b"", tenant).caller
    return request


def seen_by(read: Callable[[], Any]) -> Seen:
    """All of a request that is read at once: no event loop is needed for it."""
    try:
        seen(read).send(None)
    except StopIteration as done:
        found: Seen = done.value
        return found
    raise AssertionError("it waits")


def shown(found: Seen, tenant: Tenant | None) -> Any:
    """All of a request; fields that are doubled count where a right of its caller depends on them."""
    if isinstance(found, str):
        return found
    values, prompt = found
    return values if tenant is not None else {**values, "doubled": None}, prompt


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_body_reads_like_one_that_is_read_whole(path: str, data: st.DataObject) -> None:
    reader = ShortBodies(trusts_transfers=data.draw(st.booleans()))
    for body in data.draw(bodies_of(path)):
        for headers in (data.draw(st.sampled_from(HEADERS)), []):
            tenant = data.draw(st.sampled_from([TENANT, None]))
            request = sent(path, body, headers, tenant)
            whole = seen_by(partial(read_at_once, request, "id", reader.trusts_transfers))
            assert shown(seen_by(partial(reader.read, request, "id")), tenant) == shown(whole, tenant)


@pytest.mark.parametrize("path", BODIES)
def test_the_body_of_every_api_reads_like_one_that_is_read_whole(path: str) -> None:
    request = request_of(path, json.dumps(BODIES[path]).encode())

    for _ in range(2):
        assert seen_by(partial(READER.read, request, "id")) == seen_by(partial(read_at_once, request, "id"))


def chat(text: str = "hi", **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **fields}).encode()


def read_by(reader: ShortBodies, body: bytes, *headers: tuple[bytes, bytes]) -> InferenceRequest:
    found = reader.read(sent(CHAT, body, [*headers]), "id")
    assert found is not None
    return found


@native
def test_the_object_around_plain_messages_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ShortBodies(trusts_transfers=False)
    read_by(reader, chat("one", stream=True))
    monkeypatch.setattr(short_bodies, "said_by", None)
    monkeypatch.setattr(short_bodies, "read_at_once", None)

    second = read_by(reader, chat("two", stream=True))

    assert second.stream and second.prompt is not None and second.prompt.prompt.data.endswith(b"two")


@native
def test_what_one_request_says_in_its_header_is_not_kept_for_the_next() -> None:
    reader = ShortBodies(trusts_transfers=False)
    first = read_by(
        reader, chat(), (b"x-slo-ttft-ms", b"700"), (b"x-dualmap-priority", b"low"), (b"x-session-id", b"s")
    )

    second = read_by(reader, chat())

    assert (first.slo_s, first.asked_class, first.run) == (0.7, "low", SentRun("s", field="x-session-id"))
    assert (second.slo_s, second.asked_class, second.run) == (None, None, None)


@native
def test_what_is_set_in_one_request_is_not_set_in_the_next() -> None:
    reader = ShortBodies(trusts_transfers=False)
    first = read_by(reader, chat())
    assert first.prompt is not None
    first.prompt.salt, first.caller, first.cache_salt = "salted", request_of(CHAT, b"").caller, "salted"

    second = read_by(reader, chat())

    assert second.prompt is not None
    assert (second.prompt.salt, second.caller, second.cache_salt) == (None, None, None)


@native
def test_no_tenant_gets_what_was_read_for_another_one() -> None:
    reader = ShortBodies(trusts_transfers=False)
    own = response_id("r", "instance-0", "acme")
    fields = {"model": "m", "input": [{"role": "user", "content": "hi"}], "previous_response_id": own}
    body = json.dumps(fields).encode()

    read = reader.read(sent(RESPONSES, body, []), "id")

    assert read is not None and read.continues == own
    for other in (None, Tenant("other")):
        with pytest.raises(NotFoundError):
            reader.read(sent(RESPONSES, body, [], other), "id")


def test_a_long_body_is_left_to_its_own_reader() -> None:
    body = chat("x" * LONG_BODY_BYTES)

    assert READER.read(sent(CHAT, body, []), "id") is None


@native
def test_frames_that_no_client_sends_again_take_a_bounded_memory() -> None:
    reader = ShortBodies(trusts_transfers=False, max_frame_bytes=20_000)

    for number in range(200):
        read_by(reader, chat(user=f"user {number}"))

    assert 0 < reader.frames < 10


class Tokenizer:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    async def tokenize(self, sent: Any, *, lora: str | None, block_tokens: int) -> TokenizedPrompt:
        self.bodies.append(None if sent.source is None else dict(sent.source.body()))
        return TokenizedPrompt(None)


@pytest.mark.parametrize("fields", [{}, {"truncate_prompt_tokens": 5}])
async def test_a_tokenizer_gets_the_body_that_it_would_get_of_one_that_is_read_whole(fields: dict[str, Any]) -> None:
    tokenizer, request = Tokenizer(), sent(CHAT, chat("two\nlines", tools=[], **fields), [])

    for read in (READER.read(request, "id"), READER.read(request, "id"), read_at_once(request, "id")):
        assert read is not None and read.prompt is not None
        await read_prompt(
            read.prompt,
            model="m",
            lora=None,
            rule=RULE,
            learned=Learned(),
            tokenizer=tokenizer,
        )

    assert tokenizer.bodies[0] == tokenizer.bodies[1] == tokenizer.bodies[2]
    assert (tokenizer.bodies[0] is None) == bool(fields)
