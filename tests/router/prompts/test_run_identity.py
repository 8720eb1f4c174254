from pathlib import Path
from typing import Any

import pytest

from dualmap.api_bodies.json_body import read_json
from dualmap.router.prompts.run_identity import DIALECTS, SentRun, run_of
from dualmap.scheduling.runs.turn import hashed_name

SESSION = "0a1b2c3d-0000-4000-8000-00000000beef"


@pytest.mark.parametrize(
    ("headers", "body", "found"),
    [
        (
            {
                "x-claude-code-session-id": SESSION,
                "x-claude-code-agent-id": "a7",
                "x-claude-code-parent-agent-id": "a1",
            },
            {},
            SentRun(SESSION, "a7", "a1", "x-claude-code-session-id"),
        ),
        ({"session-id": SESSION, "thread-id": "t1"}, {}, SentRun(SESSION, "t1", "", "session-id")),
        (
            {"x-session-id": "child", "x-parent-session-id": "root"},
            {},
            SentRun("root", "child", "root", "x-session-id"),
        ),
        (
            {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"},
            {},
            SentRun("root", "child", "root", "x-dynamo-session-id"),
        ),
        (
            {"x-claude-code-session-id": SESSION, "x-dynamo-session-id": "d"},
            {},
            SentRun("d", field="x-dynamo-session-id"),
        ),
        ({"x-session-id": "s"}, {"session_id": "other"}, SentRun("s", field="x-session-id")),
        ({"x-correlation-id": "c", "x-litellm-session-id": "l"}, {}, SentRun("l", field="x-litellm-session-id")),
        ({}, {"session_id": "s"}, SentRun("s", field="session_id")),
        ({}, {"litellm_session_id": "l"}, SentRun("l", field="litellm_session_id")),
        ({}, {"metadata": {"session_id": "s"}}, SentRun("s", field="metadata.session_id")),
        (
            {},
            {"metadata": {"user_id": f"user_ab12_account__session_{SESSION}"}},
            SentRun(SESSION, field="metadata.user_id"),
        ),
        (
            {},
            {"metadata": {"user_id": f'{{"device_id":"{"0f" * 32}","account_uuid":"","session_id":"{SESSION}"}}'}},
            SentRun(SESSION, field="metadata.user_id"),
        ),
        ({}, {"prompt_cache_key": SESSION}, SentRun(SESSION, field="prompt_cache_key")),
        ({}, {"prompt_cache_key": "my-app-v2"}, None),
        ({}, {"metadata": {"user_id": "anna"}}, None),
        ({}, {"metadata": None, "session_id": 7}, None),
        ({"x-session-id": ""}, {}, None),
        ({"x-session-id": "s" * 1025}, {}, None),
        ({"x-request-id": SESSION}, {"model": "m"}, None),
    ],
)
def test_a_run_is_named_by_header_or_body(headers: dict[str, str], body: dict[str, Any], found: SentRun | None) -> None:
    fields = [(name.encode(), text.encode()) for name, text in headers.items()]

    assert run_of(fields, body) == found


def test_no_field_names_a_run_in_two_dialects() -> None:
    assert len({each.run for each in DIALECTS}) == len(DIALECTS)
    assert all(each.run == each.run.lower() for each in DIALECTS)


def test_a_name_means_nothing_to_another_tenant() -> None:
    mine, other = hashed_name("acme", SESSION, "a", "b"), hashed_name("other", SESSION, "a", "b")

    assert SESSION not in f"{mine}"
    assert {mine.run, mine.branch, mine.parent}.isdisjoint({other.run, other.branch, other.parent})
    assert mine == hashed_name("acme", SESSION, "a", "b")


def test_a_name_may_be_any_text_that_json_holds() -> None:
    body = read_json(b'{"session_id": "\\ud800"}')
    sent = run_of([], body)

    assert sent is not None
    assert hashed_name("acme", sent.run, sent.run, sent.run) != hashed_name("acme", "\ud801")
    assert hashed_name("acme", sent.run).run == hashed_name("acme", "\ud800").run


def test_the_documents_list_every_field_that_names_a_run() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operate" / "runs.md").read_text("utf-8")

    for dialect in DIALECTS:
        for field in (dialect.run, dialect.agent, dialect.parent):
            assert f"`{field.decode()}`" in page or not field
