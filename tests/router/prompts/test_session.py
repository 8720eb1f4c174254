"""Which session a request belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.prompts.inference_request import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH
from dualmap.router.prompts.run_identity import SentRun
from dualmap.router.prompts.session import FIRST_BYTES, is_under_way, session_of
from dualmap.scheduling.tenants.tenant import Caller, Tenant
from tests.router.tools import request

SYSTEM = {"role": "system", "content": "You are of few words."}


def session(path: str, body: dict[str, Any], **about: Any) -> str:
    read = request(path=path, body=body, **about)
    assert read.prompt is not None
    return session_of(read, read.prompt)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_all_turns_of_a_conversation_are_of_one_session() -> None:
    first = session(CHAT_PATH, {"messages": [SYSTEM, user("hello")]})

    assert first == session(CHAT_PATH, {"messages": [SYSTEM, user("hello"), answer("hi"), user("and now?")]})
    assert first != session(CHAT_PATH, {"messages": [SYSTEM, user("good day")]})
    assert first != session(CHAT_PATH, {"messages": [user("hello")]})


def test_the_turns_of_other_apis_are_too() -> None:
    messages = [{"messages": [user("hello"), *rest]} for rest in ([], [answer("hi"), user("more")])]
    responses = [{"input": each["messages"]} for each in messages]

    assert len({session(MESSAGES_PATH, each) for each in messages}) == 1
    assert len({session(RESPONSES_PATH, each) for each in responses}) == 1


def test_a_run_that_the_client_names_is_one_session_whatever_it_sends() -> None:
    named = SentRun("5fe1")

    one = session(CHAT_PATH, {"messages": [user("hello")]}, run=named)
    assert one == session(CHAT_PATH, {"messages": [user("good day")]}, run=SentRun("5fe1", agent="helper"))
    assert one != session(CHAT_PATH, {"messages": [user("hello")]}, run=SentRun("5fe2"))


def test_tenants_share_no_session() -> None:
    body = {"messages": [user("hello")]}
    caller = Caller(Tenant("acme"), "ci")

    assert session(CHAT_PATH, body) != session(CHAT_PATH, body, caller=caller)
    assert session(CHAT_PATH, body, run=SentRun("x")) != session(CHAT_PATH, body, run=SentRun("x"), caller=caller)


def test_a_chat_shows_whether_it_is_under_way_and_nothing_else_does() -> None:
    first = [SYSTEM, user("hello")]

    def shows(path: str, body: dict[str, Any]) -> bool:
        read = request(path=path, body=body)
        assert read.prompt is not None
        return is_under_way(read.prompt)

    assert not shows(CHAT_PATH, {"messages": first})
    assert shows(CHAT_PATH, {"messages": [*first, answer("hi"), user("and now?")]})
    assert shows(MESSAGES_PATH, {"messages": [user("hello"), answer("hi"), user("and now?")]})
    assert not shows("/v1/completions", {"prompt": "a" * FIRST_BYTES + "b"})


@pytest.mark.parametrize("longer", ["a" * FIRST_BYTES, [7] * 1024])
def test_other_prompts_are_known_by_how_they_begin(longer: Any) -> None:
    more = longer + ("b" if isinstance(longer, str) else [8])

    assert session("/v1/completions", {"prompt": longer}) == session("/v1/completions", {"prompt": more})
    assert session("/v1/completions", {"prompt": longer[:5]}) != session("/v1/completions", {"prompt": longer[:6]})


def test_what_is_pooled_belongs_to_nothing_longer() -> None:
    long = "a" * FIRST_BYTES

    assert session("/v1/embeddings", {"input": long}) != session("/v1/embeddings", {"input": long + "b"})
